#include "tessera/nn/session.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn.h>

#include <filesystem>

#include "tessera/io/file.h"
#include "tests/io/temp_folder.h"

namespace tessera::nn {
namespace {

Session session(const std::string& json) {
  return Session(torch::nn::Linear(2, 2).ptr(), Config::from_json(json), comm::Mesh());
}

void expect_value_error(const std::string& json, const std::string& text) {
  try {
    session(json);
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// What a configuration asks of the ranks and the mesh has not is an error, never left out.
TEST(Session, AxesOfTheConfigurationAreThoseOfTheMesh) {
  const std::string sgd = R"("optimizer": {"type": "SGD"})";
  expect_value_error("{" + sgd + R"(, "sequence_parallel_size": 2})",
                     "sequence_parallel_size is 2, but the mesh has 1 ranks along 'sp'");
  expect_value_error("{" + sgd + R"(, "tensor_parallel": {"autotp_size": 2}})",
                     "tensor_parallel.autotp_size is 2, but the mesh has 1 ranks along 'tp'");
  EXPECT_THROW(session("{" + sgd + R"(, "tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}})"),
               c10::NotImplementedError);
}

void train_step(Session& s) {
  s.core().pre_forward();
  at::Tensor loss = s.core().params()[0].tensor.sum();
  s.core().post_forward({loss});
  loss.backward();
  EXPECT_TRUE(s.step());
}

TEST(Session, TheScheduleMovesTheLearningRateAtEveryAppliedStep) {
  auto s = session(R"({"train_batch_size": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 4,
                                                 "warmup_type": "linear"}}})");
  const auto at = [](int64_t i) {
    optim::WarmupLR options;
    options.warmup_max_lr = {0.4};
    options.warmup_num_steps = 4;
    options.warmup_type = optim::WarmupType::Linear;
    return optim::evaluate(options, i, {0.5}).lr;
  };
  for (int64_t step = 0; step < 6; ++step) {
    EXPECT_EQ(s.lr(), at(step)) << step;
    train_step(s);
  }
}

TEST(Session, TheScheduleWaitsForTheBoundary) {
  auto s = session(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}})");
  const auto before = s.lr();
  EXPECT_FALSE(s.step());
  EXPECT_EQ(s.lr(), before);
}

TEST(Session, UnitsAreTheUsersOrThoseOfUnitPolicy) {
  const auto units = [](int stage, const UnitPolicy& policy = default_unit_policy, const std::string& zero = "") {
    const auto config = Config::from_json(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"},
      "zero_optimization": {"stage": )" + std::to_string(stage) +
                                          zero + "}}");
    const torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
    const Session s(net.ptr(), config, comm::Mesh(), nullptr, policy);
    std::vector<std::string> names;
    for (const auto& spec : s.core().params())
      names.push_back(spec.unit);
    return names;
  };
  const auto mine = [](const torch::nn::Module&) { return engine::UnitNames{{"0.bias", "mine"}}; };
  using Names = std::vector<std::string>;
  EXPECT_EQ(units(2), Names(4, "root"));
  EXPECT_EQ(units(3), (Names{"0", "0", "1", "1"})) << "each is whole only while it runs";
  EXPECT_EQ(units(2, mine), (Names{"root", "mine", "root", "root"}));
  EXPECT_EQ(units(3, mine), (Names{"0", "mine", "1", "1"}));
  const std::string leaf = R"(, "leaf_module": {"names": "0", "name_suffixes": ["nowhere"]})";
  EXPECT_EQ(units(3, mine, leaf), (Names{"0", "0", "1", "1"}));
  EXPECT_EQ(units(2, mine, leaf), (Names{"root", "mine", "root", "root"})) << "marks are for partitioned parameters";
}

TEST(Session, WithoutAScheduleTheLearningRateStays) {
  auto s = session(R"({"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})");
  train_step(s);
  EXPECT_EQ(s.lr(), std::vector<double>{0.5});
}

TEST(Session, AConfigurationMustNameANativeOptimizerAndSchedule) {
  expect_value_error(R"({"train_batch_size": 1})", "names no optimizer that runs in C++");
  expect_value_error(R"({"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "scheduler": {"type": "StepLR", "params": {"step_size": 1}}})",
                     "StepLR");
}

TEST(Session, InputsAreCastInPythonOnly) {
  const auto json = [](const char* on) {
    return R"({"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
      "fp16": {"auto_cast": true, "enabled": )" +
           std::string(on) + "}}";
  };
  EXPECT_THROW(session(json("true")), c10::NotImplementedError);
  EXPECT_NO_THROW(session(json("false")));
}

TEST(Session, Bf16ConvertsParametersAndKeepsBuffersUnlessTheyAreAskedFor) {
  for (const auto& [keys, dtype] :
       {std::pair("", at::kFloat), {R"(, "data_types": {"buffer_dtype": "bf16"})", at::kBFloat16}}) {
    torch::nn::BatchNorm1d net(3);
    Session s(net.ptr(),
              Config::from_json(std::string(R"({"train_batch_size": 1, "bf16": {"enabled": true},
      "optimizer": {"type": "Adam"})") +
                                keys + "}"),
              comm::Mesh());
    EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->running_mean.scalar_type(), dtype) << "as in Python";
    EXPECT_EQ(net->num_batches_tracked.scalar_type(), at::kLong);
  }
}

TEST(Session, WeightsForOtherTools) {
  struct Tied : torch::nn::Module {
    Tied() {
      const at::Tensor weight = register_parameter("first", torch::randn({3, 3}));
      register_parameter("bias", torch::randn({3}));
      register_parameter("second", weight);
      register_buffer("count", torch::tensor(5));
    }
  };
  const io::TempFolder folder;
  for (const bool gather : {true, false}) {
    const auto net = std::make_shared<Tied>();
    Session s(net,
              Config::from_json(c10::str(R"({"train_batch_size": 1, "bf16": {"enabled": true},
        "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3,
        "stage3_gather_16bit_weights_on_model_save": )",
                                         gather ? "true" : "false", "}}")),
              comm::Mesh());
    EXPECT_EQ(s.save_16bit_model(folder.path()), gather);
    EXPECT_EQ(s.save_16bit_model(folder / "other", "model.safetensors", {.max_shard_bytes = 20}), gather);
    if (!gather) continue;
    const std::string bytes = io::read_text(folder / "pytorch_model.bin", 1 << 20);
    const auto state = torch::jit::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
    EXPECT_EQ(state.size(), 4u);
    const auto value = [&](const char* name) { return state.at(std::string(name)).toTensor(); };
    EXPECT_EQ(value("first").scalar_type(), at::kBFloat16);
    EXPECT_TRUE(value("first").is_alias_of(value("second")));
    EXPECT_EQ(value("count").item<int>(), 5);
    EXPECT_TRUE(std::filesystem::exists(folder / "other/model.safetensors.index.json"));
    std::filesystem::remove_all(folder / "other");
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "other")) << "nothing is written";
}

}  // namespace
}  // namespace tessera::nn

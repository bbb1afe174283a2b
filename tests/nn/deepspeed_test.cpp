// Checkpoints of DeepSpeed's layouts, loaded and saved by sessions in C++.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <filesystem>
#include <mutex>

#include "tessera/checkpoint/deepspeed/save.h"
#include "tessera/nn/engine.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

// The generator is the program's, ranks are threads.
torch::nn::Sequential net_of(uint64_t seed) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})),
                            torch::nn::Linear(7, 3));
  net->parameters()[1].requires_grad_(false);
  return net;
}

Config config_of(int stage, const std::string& format = "tessera") {
  return Config::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": )" +
      std::to_string(stage) + R"(}, "checkpoint": {"format": ")" + format +
      R"("}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
                             "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}})");
}

// Masters and moments by name, whole.
using Values = std::map<std::string, at::Tensor>;

struct TrainedRun {
  Values values;
  std::vector<double> rates;
  int64_t steps = 0;
};

template <class E>
TrainedRun state_of(E& engine, const torch::nn::Sequential& net) {
  TrainedRun run{{}, engine.lr(), engine.core().global_steps()};
  for (const auto& param : net->named_parameters())
    if (param.value().requires_grad()) {
      run.values[param.key()] = engine.states().full_param(param.key()).clone();
      for (const char* kind : {"exp_avg", "exp_avg_sq", "step"})
        run.values[param.key() + " " + kind] = engine.states().full_state(param.key(), kind).clone();
    }
  return run;
}

template <class E>
void train(E& engine, int64_t steps) {
  const at::Tensor batch = at::arange(20, at::kFloat).view({4, 5}).sin();
  for (int64_t step = 0; step < steps; ++step) {
    engine.forward(batch.to(at::kBFloat16)).square().mean().backward();
    engine.step();
  }
}

TrainedRun save(const std::string& dir, int ranks, int stage, const std::string& format) {
  TrainedRun saved;
  testing::run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
    auto net = net_of(1);
    auto engine = initialize(net, config_of(stage, format), comm::Mesh(group));
    train(engine, 3);
    engine.save_checkpoint(dir, {}, {{"epoch", int64_t{7}}, {"losses", at::ones({2})}});
    const TrainedRun run = state_of(engine, net);
    if (rank == 0) saved = run;
  });
  return saved;
}

void expect_loads(const std::string& dir, const std::string& tag, int ranks, int stage, const TrainedRun& saved) {
  testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
    auto net = net_of(2);
    auto engine = initialize(net, config_of(stage), comm::Mesh(group));
    const Loaded loaded = engine.load_checkpoint(dir, tag);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded.client.at("epoch").toInt(), 7);
    EXPECT_TRUE(loaded.client.at("losses").toTensor().equal(at::ones({2})));
    const TrainedRun run = state_of(engine, net);
    EXPECT_EQ(run.steps, saved.steps);
    EXPECT_EQ(run.rates, saved.rates);
    for (const auto& [name, value] : saved.values)
      EXPECT_TRUE(run.values.at(name).equal(value)) << name << " of " << dir << " on " << ranks << " at " << stage;
    train(engine, 1);
  });
}

// A checkpoint in Tessera's own format says which parameters its groups have.
TEST(DeepSpeed, ARunWithSeveralGroupsIsConvertedLater) {
  const io::TempFolder folder;
  const auto make = [] {
    torch::nn::Linear layer(3, 2);
    Recipe recipe;
    recipe.groups = {{.params = {layer->bias}, .set = [](optim::GroupOptions& group) { group.lr = 0.5; }}};
    auto engine = initialize(layer, Config::from_json(R"({"train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}}})"),
                             comm::Mesh(), recipe);
    return std::pair(std::move(engine), layer);
  };
  auto [saved, layer] = make();
  saved.backward(saved.forward(at::ones({1, 3})).sum());
  EXPECT_TRUE(saved.step());
  saved.save_checkpoint(folder / "ours");
  for (const int stage : {1, 3}) {
    const std::string out = folder / std::to_string(stage);
    checkpoint::to_deepspeed(folder / "ours", out, "", {stage, 2});
    auto [loaded, other] = make();
    EXPECT_TRUE(loaded.load_checkpoint(out));
    EXPECT_TRUE(other->weight.equal(layer->weight) && other->bias.equal(layer->bias));
    EXPECT_EQ(loaded.lr(), (std::vector<double>{0.5, 0.25}));
    EXPECT_TRUE(loaded.states().full_state("bias", "exp_avg").equal(saved.states().full_state("bias", "exp_avg")));
  }
}

TEST(DeepSpeed, SessionsLoadEveryLayoutOnAnyRanks) {
  const io::TempFolder folder;
  const TrainedRun saved = save(folder / "ours", 2, 2, "tessera");
  for (int stage = 0; stage <= 3; ++stage) {
    const std::string out = folder / std::to_string(stage);
    EXPECT_EQ(checkpoint::to_deepspeed(folder / "ours", out, "", {stage, 3}), "global_step3");
    EXPECT_FALSE(std::filesystem::exists(out + "/global_step3/manifest.json"));
    expect_loads(out, "", 1, (stage + 1) % 4, saved);
    expect_loads(out, "", 2, (stage + 2) % 4, saved);
    checkpoint::open(out).verify_all();
    EXPECT_EQ(checkpoint::client_values(checkpoint::open(out)).at("epoch").toInt(), 7);
    if (stage == 0) continue;
    const std::string tag = checkpoint::to_universal(out, folder / "universal", "");
    expect_loads(folder / "universal", tag, 2, stage, saved);
  }
}

TEST(DeepSpeed, SessionsSaveItsFiles) {
  for (int stage = 0; stage <= 3; ++stage) {
    const io::TempFolder folder;
    const TrainedRun saved = save(folder.path(), 2, stage, "deepspeed");
    EXPECT_FALSE(std::filesystem::exists(folder / "global_step3/manifest.json"));
    EXPECT_FALSE(std::filesystem::exists(folder / ".tessera-saving"));
    expect_loads(folder.path(), "", 3, (stage + 1) % 4, saved);
  }
}

// An optimizer of torch's has its steps in the checkpoint's numbers.
TEST(DeepSpeed, OptimizersOfTorchGoOn) {
  const io::TempFolder folder;
  save(folder.path(), 2, 2, "deepspeed");
  auto net = net_of(2);
  std::vector<at::Tensor> params = net->parameters();
  auto optimizer = std::make_shared<torch::optim::AdamW>(params, torch::optim::AdamWOptions(0.01));
  const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
      "zero_optimization": {"stage": 1}})");
  auto engine = initialize(net, config, Recipe{.optimizer = optimizer});
  ASSERT_TRUE(engine.load_checkpoint(folder.path()));
  for (const auto& [key, state] : optimizer->state())
    EXPECT_EQ(static_cast<const torch::optim::AdamWParamState&>(*state).step(), 3);
  EXPECT_FALSE(optimizer->state().empty());
}

// What a rank asks for alone: the others do not wait for it, and all go on.
TEST(DeepSpeed, WhatOneRankCannotSaveIsAnErrorOnAll) {
  for (const char* format : {"tessera", "deepspeed"}) {
    const io::TempFolder folder;
    testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      auto net = net_of(1);
      auto engine = initialize(net, config_of(1, format), comm::Mesh(group));
      const auto error = [&](const std::string& dir, const engine::SaveOptions& options) {
        return testing::error_of<c10::ValueError>([&] { engine.save_checkpoint(dir, options); });
      };
      EXPECT_HAS(error(rank == 1 ? "" : folder.path(), {}),
                 "[engine.save_checkpoint] save_dir is empty; name a folder");
      EXPECT_HAS(error(folder.path(), {.keep_last = rank == 0 ? -1 : 1}), "keep_last is a number of checkpoints");
      train(engine, 1);
    });
  }
}

TEST(DeepSpeed, WhatCannotBeIsRefused) {
  const io::TempFolder folder;
  const auto refused = [&](const auto& call) { return testing::error_of<c10::Error>(call); };
  auto net = net_of(1);
  auto engine = initialize(net, config_of(1, "deepspeed"));
  const ClientValues own{{"global_steps", int64_t{1}}, {"mine", int64_t{1}}, {"module", int64_t{1}}};
  EXPECT_HAS(refused([&] { engine.save_checkpoint(folder.path(), {}, own); }),
             "the program's values (client_state) have keys that are DeepSpeed's own: global_steps, module");
  EXPECT_HAS(refused([&] { engine.save_checkpoint(folder.path(), engine::SaveOptions{.asynchronous = true}); }),
             "asynchronously");
  EXPECT_HAS(refused([&] { engine.save_checkpoint(folder.path(), engine::SaveOptions{.tag = "../x"}); }), "tag");
  EXPECT_EQ(engine.save_checkpoint(folder.path()), "global_step0");
  EXPECT_HAS(refused([&] { checkpoint::to_deepspeed(folder.path(), folder / "out", "", {4, 1}); }), "no stage 4");
  EXPECT_HAS(refused([&] { checkpoint::to_deepspeed(folder.path(), folder / ".", "", {1, 1}); }),
             "has the checkpoint itself, which DeepSpeed's files would replace");
  EXPECT_HAS(refused([&] { checkpoint::to_deepspeed(folder.path(), folder / "out", "x", {1, 1}); }),
             "_model_states.pt");
}

}  // namespace
}  // namespace tessera::nn

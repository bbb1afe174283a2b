#include "tessera/nn/state_dict.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include "tests/io/temp_folder.h"
#include "tests/nn/stages.h"
#include "tests/support/errors.h"

// Of its own: other files have a Net, too.
namespace tessera::nn::state_dict_tests {
namespace {

using checkpoint::WeightReader;
using comm::Axis;
using shard::Quantity;
using testing::error_of;
using testing::kWidth;

// Layers that are cut over tp, one that has two names, one that is frozen, and buffers.
struct Net : torch::nn::Module {
  explicit Net(const comm::Mesh& mesh) {
    in = register_module("in", testing::fresh(0, torch::nn::Linear(6, kWidth)));
    cut = register_module("cut", testing::Cut(1, mesh));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    register_buffer("shift", at::zeros({kWidth}));
    register_buffer("seen", at::tensor(3));
    still = register_module("still", testing::fresh(2, torch::nn::Linear(kWidth, kWidth)));
    register_module("again", still);
    out = register_module("out", testing::fresh(3, torch::nn::Linear(kWidth, 3)));
    for (at::Tensor& param : still->parameters())
      param.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) { return out(norm(cut(in(x)) + still(in(x)))); }
  torch::nn::Linear in{nullptr}, still{nullptr}, out{nullptr};
  testing::Cut cut{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

struct Case {
  testing::AxisSizes axes;
  int stage = 0;
  bool bf16 = false;
};

// f(engine, rank) for every stage, precision and mesh.
template <class F>
void each(const F& f) {
  for (const testing::AxisSizes& axes : std::vector<testing::AxisSizes>{{{Axis::DpShard, 1}},
                                                                        {{Axis::DpShard, 2}},
                                                                        {{Axis::DpShard, 2}, {Axis::Tp, 2}},
                                                                        {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}}}) {
    for (int stage = 0; stage < 4; ++stage) {
      for (const bool bf16 : {false, true}) {
        const auto config = Config::from_json(c10::str(
            R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
              "bf16": {"enabled": )",
            bf16 ? "true" : "false", R"(}, "tensor_parallel": {"autotp_size": )", axes.contains(Axis::Tp) ? 2 : 0, R"(},
              "zero_optimization": {"stage3_gather_16bit_weights_on_model_save": true,
                                    "stage3_param_persistence_threshold": 10, "stage": )",
            stage, "}}"));
        testing::run_axes(axes, [&](int rank, const comm::Mesh& mesh) {
          const testing::KeptWarnings kept;
          SCOPED_TRACE(c10::str("stage ", stage, ", ", mesh.size(comm::kAxes), " ranks, bf16 ", bf16));
          auto engine = initialize(std::make_shared<Net>(mesh), config, mesh);
          f(engine, rank);
        });
      }
    }
  }
}

template <class E>
void train(E& engine) {
  const at::ScalarType dtype = engine.module().in->weight.scalar_type();
  engine.forward(at::linspace(-1, 1, 24).view({4, 6}).to(dtype)).to(at::kFloat).square().mean().backward();
  EXPECT_TRUE(engine.step());
}

// Other values for all that `state` has, the same on every rank.
NamedTensors others(const NamedTensors& state) {
  NamedTensors result;
  for (const auto& item : state)
    result.insert(item.key(), (at::linspace(-3, 5, std::max<int64_t>(1, item.value().numel())) * 0.37)
                                  .view(item.value().sizes())
                                  .to(item.value().is_floating_point() ? at::kFloat : item.value().scalar_type()));
  for (const char* name : {"weight", "bias"})
    result[std::string("again.") + name] = result[std::string("still.") + name];
  return result;
}

void expect_same(const NamedTensors& found, const NamedTensors& want) {
  EXPECT_EQ(found.keys(), want.keys());
  for (const auto& item : want)
    EXPECT_TRUE(found[item.key()].equal(item.value().to(found[item.key()].scalar_type()))) << item.key();
}

NamedTensors copied(const NamedTensors& state) {
  NamedTensors result;
  for (const auto& item : state)
    result.insert(item.key(), item.value().clone());
  return result;
}

std::vector<at::Tensor> masters(engine::Engine& core) {
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < core.params().size(); ++i)
    if (core.params()[i].group >= 0)
      all.push_back(core.states().get_full(static_cast<int>(i), Quantity::Master).clone());
  return all;
}

}  // namespace

TEST(StateDict, WholeValuesOutAndIn) {
  each([](auto& engine, int) {
    train(engine);
    const NamedTensors first = copied(engine.module_state_dict());
    EXPECT_EQ(first.size(), 16U);
    EXPECT_EQ(first["cut.up.weight"].sizes(), (at::IntArrayRef{12, kWidth}));
    EXPECT_TRUE(first["again.weight"].equal(first["still.weight"]));
    EXPECT_EQ(engine.module_state_dict(/*frozen=*/false).size(), 12U);
    const auto before = masters(engine.core());
    EXPECT_TRUE(engine.load_module_state_dict(first).missing.empty());
    const auto same = masters(engine.core());
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(same[i].equal(before[i])) << "what is not changed keeps the bits of its master";

    const NamedTensors want = others(first);
    engine.load_module_state_dict(want);
    expect_same(engine.module_state_dict(), want);
    train(engine);
    EXPECT_FALSE(engine.module_state_dict()["in.weight"].equal(want["in.weight"]));
  });
}

// Values of fp32 are the masters' own, whatever was there before; from files, too.
TEST(StateDict, MastersHaveWhatIsLoadedAsItIs) {
  const io::TempFolder folder;
  NamedTensors want;
  {
    const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})");
    want = others(initialize(std::make_shared<Net>(comm::Mesh()), config, comm::Mesh()).module_state_dict());
  }
  checkpoint::write_weights(folder / "one", "model.safetensors", want);
  each([&](auto& engine, int) {
    const auto expect_loaded = [&](const char* when) {
      const auto params = engine.module().named_parameters();
      for (const auto& item : want)
        if (const at::Tensor* param = params.find(item.key()); param != nullptr && param->requires_grad()) {
          EXPECT_TRUE(engine.states().full_param(item.key()).equal(item.value())) << item.key() << " " << when;
        }
      expect_same(engine.module_state_dict(), want);
    };
    engine.load_module_state_dict(want);
    expect_loaded("loaded");
    train(engine);
    engine.load_module_state_dict(want);
    expect_loaded("loaded again after a step");
    train(engine);
    engine.load_module_state_dict(WeightReader(folder / "one"));
    expect_loaded("from files");
    NamedTensors slices;
    for (const auto& param : engine.module().named_parameters())
      if (param.value().sizes() != want[param.key()].sizes())
        slices.insert(param.key(), at::full(param.value().sizes(), 0.3));
    engine.load_module_state_dict(slices, {.strict = false});
    for (const auto& item : slices)
      EXPECT_TRUE(engine.states().full_param(item.key()).eq(0.3F).all().template item<bool>())
          << "a slice, " << item.key();
    train(engine);
  });
}

// Whole values in files, of any number, and under other names.
TEST(StateDict, OfFiles) {
  const io::TempFolder folder;
  NamedTensors want, renamed;
  {
    const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})");
    want = others(initialize(std::make_shared<Net>(comm::Mesh()), config, comm::Mesh()).module_state_dict());
  }
  for (const auto& item : want)
    if (!item.key().starts_with("again.")) renamed.insert("model." + item.key(), item.value());
  checkpoint::write_weights(folder / "one", "model.safetensors", want);
  checkpoint::write_weights(folder / "many", "model.safetensors", renamed, {.max_shard_bytes = 300});
  each([&](auto& engine, int rank) {
    const auto before = copied(engine.module_state_dict());
    const LoadedNames names = engine.load_module_state_dict(WeightReader(folder / "one"));
    EXPECT_TRUE(names.missing.empty() && names.unexpected.empty());
    expect_same(engine.module_state_dict(), want);
    engine.load_module_state_dict(before);
    engine.load_module_state_dict(WeightReader(folder / "many"),
                                  {.rename = [](const std::string& name) { return "model." + name; }});
    expect_same(engine.module_state_dict(), want);
    const std::string out = folder / c10::str("out", engine.core().mesh().size(comm::kAxes));
    EXPECT_TRUE(engine.save_16bit_model(out, "model.safetensors"));
    const auto state = engine.module_state_dict();
    if (rank != 0) return;
    const WeightReader files(out);
    for (const auto& item : state)
      EXPECT_TRUE(files.read(item.key()).equal(item.value())) << item.key();
  });
}

// All of it is named, on every rank, and nothing has changed.
TEST(StateDict, WhatDoesNotFit) {
  each([](auto& engine, int rank) {
    const NamedTensors before = copied(engine.module_state_dict());
    NamedTensors other;
    for (const auto& item : before)
      if (item.key() != "norm.bias" && item.key() != "shift" && !item.key().starts_with("still."))
        other.insert(item.key(), item.value() + 1);
    other.insert("more", at::ones({1}));
    const LoadOptions loose{.strict = false};
    const auto load = [&](const NamedTensors& state, const LoadOptions& options = {}) {
      return error_of<c10::ValueError>([&] { engine.load_module_state_dict(state, options); });
    };
    const std::string text = load(other);
    EXPECT_HAS(text, "[engine.load_module_state_dict] what is to be loaded does not fit:");
    EXPECT_HAS(text, "\n  not there: 'norm.bias' 'shift'");
    EXPECT_HAS(text, "\n  not in the module: 'more'");
    NamedTensors bad = copied(before);
    if (rank == engine.core().mesh().size(comm::kAxes) - 1) bad["out.weight"] = at::ones({kWidth, 3});
    EXPECT_HAS(load(bad, loose), "'out.weight' has shape [8, 3] there and [3, 8] here");
    expect_same(engine.module_state_dict(), before);
    const bool last = rank == engine.core().mesh().size(comm::kAxes) - 1;
    const auto wrong_here = [&](const char* name, const at::Tensor& value) {
      NamedTensors wrong;
      for (const auto& item : before)
        wrong.insert(item.key(), last && item.key() == name ? value : item.value() + 1);
      return load(wrong);
    };
    const at::Tensor weight = before["out.weight"], buffer = before["shift"];
    EXPECT_HAS(wrong_here("out.weight", weight.to(at::kMeta)), "'out.weight' is on the meta device there");
    EXPECT_HAS(wrong_here("shift", buffer.to(at::kMeta)), "'shift' is on the meta device there");
    EXPECT_HAS(wrong_here("out.weight", weight.to(at::kComplexFloat)), "'out.weight' is complex there and real here");
    EXPECT_HAS(wrong_here("out.weight", weight.to(at::kByte).view(at::ScalarType::Float4_e2m1fn_x2)),
               c10::str("'out.weight' is of Float4_e2m1fn_x2 there and of ", weight.scalar_type(), " here"));
    EXPECT_HAS(wrong_here("out.weight", weight.to_sparse()), "'out.weight' is sparse");
    EXPECT_HAS(wrong_here("out.weight", at::Tensor()), "not there: 'out.weight'");
    const LoadOptions renames{.rename = [&](const std::string& name) {
      if (last && name == "out.weight") throw std::runtime_error("no such name");
      return name;
    }};
    EXPECT_HAS(load(before, renames), "`rename` threw for 'out.weight': no such name");
    expect_same(engine.module_state_dict(), before);

    const LoadedNames names = engine.load_module_state_dict(other, loose);
    EXPECT_EQ(names.missing, (std::vector<std::string>{"norm.bias", "shift"}));
    EXPECT_EQ(names.unexpected, std::vector<std::string>{"more"});
    const NamedTensors now = engine.module_state_dict();
    EXPECT_TRUE(now["norm.bias"].equal(before["norm.bias"]));
    EXPECT_TRUE(now["out.bias"].equal(other["out.bias"]));
    train(engine);
  });
}

}  // namespace tessera::nn::state_dict_tests

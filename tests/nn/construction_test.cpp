#include "tessera/nn/construction.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include "tessera/nn/engine.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/open_files.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

// `disk`: a folder where parameters live; empty: they live on the device.
Config config(int ranks, int stage, const std::string& disk = "") {
  const std::string away = R"(, "offload_param": {"device": "nvme", "max_in_cpu": 0, "nvme_path": ")" + disk + "\"}";

  return Config::from_json(R"({"gradient_clipping": 0, "train_micro_batch_size_per_gpu": 4, "train_batch_size": )" +
                           std::to_string(4 * ranks) + R"(, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": )" +
                           std::to_string(stage) + R"(, "stage3_param_persistence_threshold": 0)" +
                           (disk.empty() ? "" : away) + "}}");
}

// Values that a rank could not make alone: those of rank 0 must hold.
torch::nn::Linear layer(int rank, int number) {
  torch::nn::Linear linear(6, 6);
  const torch::NoGradGuard no_grad;
  linear->weight.copy_(at::arange(36).view({6, 6}).mul(0.001 * (number + 1)).add(0.1 * rank));
  linear->bias.fill_(0.1 * number + rank);
  return linear;
}

std::vector<at::Tensor> train(Engine<torch::nn::SequentialImpl> engine) {
  for (int step = 0; step < 3; ++step) {
    engine.forward(at::linspace(-1, 1, 24).view({4, 6}) + engine.rank()).square().mean().backward();
    engine.step();
  }
  std::vector<at::Tensor> weights;
  for (size_t i = 0; i < engine.core().params().size(); ++i)
    weights.push_back(engine.core().states().get_full(static_cast<int>(i), engine::Quantity::Master));
  return weights;
}

// With parameters on a disk one rank partitions, too, and nothing is left on the device.
TEST(Construction, AnEngineTrainsWhatWasBuiltInPartitions) {
  struct Row {
    int ranks, stage;
    bool on_disk;
  };
  for (const auto [ranks, stage, on_disk] :
       {Row{3, 0, false}, Row{3, 2, false}, Row{3, 3, false}, Row{1, 3, true}, Row{2, 3, true}}) {
    const std::string what = c10::str(ranks, " ranks, stage ", stage, on_disk ? ", on a disk" : "");
    testing::run_ranks(ranks, [&, ranks = ranks, stage = stage, on_disk = on_disk](int rank, const auto& group) {
      const io::TempFolder disk;
      const Config built = config(ranks, stage, on_disk ? disk.path() : "");
      Construction building(built, comm::Mesh(group));
      torch::nn::Sequential early, plain;
      for (int i = 0; i < 4; ++i) {
        early->push_back(building.partition(layer(rank, i)));
        plain->push_back(layer(0, i));
      }
      EXPECT_HAS(testing::error_of([&] { (void)early->parameters()[0].sum(); }), "parameter 'weight' is partitioned");
      EXPECT_EQ(building.bytes() > 0, !on_disk) << what;
      EXPECT_EQ(testing::files_in(disk.path()).empty(), !on_disk) << what;
      const auto got = train(initialize(early, built, building));
      const auto want = train(initialize(plain, config(ranks, stage), comm::Mesh(group)));
      EXPECT_EQ(building.bytes(), 0) << what;
      for (size_t i = 0; i < want.size(); ++i)
        EXPECT_TRUE(got[i].equal(want[i])) << what << ", " << i;
    });
  }
}

TEST(Construction, RegionsReadAndWriteBeforeThereIsAnEngine) {
  testing::run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    Construction building(config(2, 3), comm::Mesh(group));
    const auto linear = building.partition(layer(rank, 1));
    const at::Tensor other = at::ones({2});
    building.gather({linear->weight, linear->bias, other});
    EXPECT_TRUE(linear->bias.equal(at::full({6}, 0.1)));
    linear->bias.detach().fill_(rank);
    building.release({linear->weight, linear->bias, other}, 1);
    building.gather({linear->bias});
    EXPECT_TRUE(linear->bias.equal(at::ones({6})));
    building.release({linear->bias});
    const auto write_and_throw = [&] {
      const GatheredParameters region(building, {linear->bias}, 1);
      linear->bias.detach().fill_(rank + 4);
      throw std::runtime_error("half way");
    };
    EXPECT_THROW(write_and_throw(), std::runtime_error);
    EXPECT_HAS(
        testing::error_of<c10::ValueError>([&] { const GatheredParameters region(building, {linear->bias}, 2); }),
        "modifier_rank 2 is no rank of a group of 2");
    const GatheredParameters region(building, {linear->bias});
    EXPECT_TRUE(linear->bias.equal(at::full({6}, 5)));
  });
}

// All that constructors do: layers of torch, parameters and buffers of one's own, tensors that nothing registers, values
// that are written again by the parent.
struct ManyImpl : torch::nn::Module {
  explicit ManyImpl(bool again) {
    namespace nn = torch::nn;
    tokens = register_module("tokens", nn::Embedding(nn::EmbeddingOptions(11, 6).padding_idx(3)));
    position = register_parameter("position", torch::randn({5, 6}) * 0.02);
    const at::Tensor angles = torch::outer(torch::arange(5), torch::pow(10, -torch::arange(3) / 3.0));
    register_buffer("rotary", torch::stack({angles.sin(), angles.cos()}));
    register_buffer("scale", torch::tensor({{0.5, 2.0}, {1.0, 4.0}}));
    kept = torch::rand({4}).cumsum(0);
    kept_part = kept[1];
    rest->push_back(nn::Linear(6, 6));
    rest->push_back(nn::Conv1d(6, 4, 3));
    rest->push_back(nn::BatchNorm1d(6));
    rest->push_back(nn::LSTM(nn::LSTMOptions(6, 4).num_layers(2)));
    rest->push_back(nn::MultiheadAttention(6, 2));
    rest->push_back(nn::LayerNorm(nn::LayerNormOptions({6})));
    register_module("rest", rest);
    const torch::NoGradGuard no_grad;
    std::vector<float> list{1, 2, 3, 4, 5, 6};
    rest->ptr(0)->as<nn::Linear>()->bias.copy_(torch::from_blob(list.data(), {6}));
    list.assign(6, 0);
    rest->ptr(5)->as<nn::LayerNorm>()->weight.set_data(torch::full({6}, 1.5));
    if (!again) return;
    apply([](nn::Module& module) {
      if (auto* linear = module.as<nn::Linear>()) nn::init::normal_(linear->weight, 0, 0.02);
      if (auto* table = module.as<nn::Embedding>()) nn::init::uniform_(table->weight, -0.02, 0.02);
    });
    nn::init::orthogonal_(rest->ptr(0)->as<nn::Linear>()->weight);
  }
  torch::nn::Embedding tokens{nullptr};
  at::Tensor position, kept, kept_part;
  torch::nn::ModuleList rest;
};
TORCH_MODULE(Many);

TEST(Construction, BuildGivesTheValuesOfAPlainConstruction) {
  for (const auto& [again, on_disk] : {std::pair{false, true}, {true, true}, {true, false}}) {
    const io::TempFolder disk;
    testing::run_ranks(1, [&, again = again, on_disk = on_disk](int /*rank*/, const comm::GroupPtr& group) {
      torch::manual_seed(7);
      const Many plain(again);
      const at::Tensor after = torch::rand({3});
      torch::manual_seed(7);
      Construction building(config(1, 3, on_disk ? disk.path() : ""), comm::Mesh(group));
      const auto built = building.build([&] { return Many(again); });
      EXPECT_TRUE(torch::rand({3}).equal(after));
      EXPECT_EQ(building.bytes() == 0, on_disk);
      for (const at::Tensor& t : {built->kept, built->kept_part})
        ASSERT_FALSE(t.is_meta());
      for (const auto& t : built->named_buffers())
        ASSERT_FALSE(t.value().is_meta()) << t.key();
      for (const auto& t : built->named_parameters())
        ASSERT_FALSE(t.value().is_meta()) << t.key();
      EXPECT_TRUE(built->kept.equal(plain->kept) && built->kept_part.equal(plain->kept_part));
      EXPECT_TRUE(built->kept_part.is_alias_of(built->kept));
      const auto buffers = built->named_buffers();
      for (const auto& want : plain->named_buffers())
        EXPECT_TRUE(buffers[want.key()].equal(want.value())) << want.key();
      const GatheredParameters region(building, built->parameters());
      const auto got = built->named_parameters();
      for (const auto& want : plain->named_parameters()) {
        EXPECT_TRUE(got[want.key()].equal(want.value())) << want.key();
        EXPECT_TRUE(got[want.key()].requires_grad()) << want.key();
      }
    });
  }
}

// Counts what torch's allocator gives this thread.
struct Allocations : c10::MemoryReportingInfoBase {
  int64_t now = 0, most = 0;
  void reportMemoryUsage(void* /*ptr*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    most = std::max(most, now += bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

TEST(Construction, BuildHoldsOneWholePieceAtATime) {
  for (const bool again : {false, true}) {
    testing::run_ranks(4, [&](int rank, const comm::GroupPtr& group) {
      constexpr int64_t kWidth = 256, kLayers = 160, kPiece = kWidth * kWidth * 4, kAll = kLayers * kPiece;
      Construction building(config(4, 3), comm::Mesh(group));
      const auto make = [&] {
        torch::nn::Sequential model;
        for (int i = 0; i < kLayers; ++i)
          model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; again && i < kLayers; ++i)
          model->ptr(i)->as<torch::nn::Linear>()->weight.fill_(static_cast<double>(10 * rank) + static_cast<double>(i));
        return model;
      };
      const auto counted = std::make_shared<Allocations>();
      torch::nn::Sequential model;
      {
        const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, counted);
        model = building.build(make);
      }
      EXPECT_EQ(building.bytes(), kAll / 4);
      EXPECT_GE(counted->most, kAll / 4);
      // What waits to be written again is whole up to 8 MiB, and what is used within 32 operators.
      EXPECT_LT(counted->most, kAll / 4 + (again ? 64 : 4) * kPiece);
      if (!again) return;
      const GatheredParameters region(building, model->parameters());
      for (size_t i = 0; i < kLayers; ++i)
        EXPECT_EQ(model->ptr(i)->as<torch::nn::Linear>()->weight.min().item<double>(), static_cast<double>(i));
    });
  }
}

TEST(Construction, BuiltModelsTrainAsPlainOnes) {
  for (const auto& [ranks, stage] : {std::pair{3, 3}, {2, 1}}) {
    testing::run_ranks(ranks, [ranks = ranks, stage = stage](int rank, const auto& group) {
      const auto model = [](int of) {
        torch::nn::Sequential layers;
        for (int i = 0; i < 4; ++i)
          layers->push_back(layer(of, i));
        return layers;
      };
      Construction building(config(ranks, stage), comm::Mesh(group));
      const auto early = building.build([&] { return model(rank); }, at::kCPU);
      const auto got = train(initialize(early, config(ranks, stage), building));
      const auto want = train(initialize(model(0), config(ranks, stage), comm::Mesh(group)));
      for (size_t i = 0; i < want.size(); ++i)
        EXPECT_TRUE(got[i].equal(want[i])) << i;
    });
  }
}

TEST(Construction, WhatWasMovedFromSaysSo) {
  const Config built = config(1, 3);
  Construction building(built, comm::Mesh());
  const auto linear = building.partition(layer(0, 1));
  Construction other = std::move(building);
  EXPECT_GT(other.bytes(), 0);
  std::vector<engine::ParamSpec> specs;
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { building.bytes(); }, [&] { building.partition(layer(0, 1)); }, [&] { building.mesh(); },
           [&] { building.build([] { return layer(0, 1); }); }, [&] { building.gather({linear->weight}); },
           [&] { building.release({linear->weight}); }, [&] { building.restore(linear->weight); },
           [&] { building.hand_over(specs); }, [&] { initialize(linear, built, building); },
           [&] { const GatheredParameters region(building, {linear->weight}); }})  // NOLINT
    EXPECT_HAS(testing::error_of<UsageError>(call), "[construction] this object was moved from");
  initialize(linear, built, other).forward(at::ones({4, 6})).sum().backward();
}

TEST(Construction, WhatNeedsValuesIsRefusedInsideBuild) {
  testing::run_ranks(1, [](int /*rank*/, const comm::GroupPtr& group) {
    Construction building(config(1, 3), comm::Mesh(group));
    const auto linear = [] { return torch::nn::Linear(2, 2); };
    const at::Tensor outside = at::ones({2, 2});
    const auto error = [&](const std::function<void(torch::nn::Linear&)>& then) {
      return testing::error_of([&] {
        building.build([&] {
          auto module = linear();
          then(module);
          return module;
        });
      });
    };
    EXPECT_HAS(error([](auto& module) { (void)module->weight.sum().template item<float>(); }),
               "inside build() tensors have no");
    EXPECT_HAS(error([](auto& module) { (void)module->weight.template data_ptr<float>(); }),
               "inside build() tensors have no");
    EXPECT_HAS(error([&](auto& module) { outside.copy_(module->weight.detach()); }),
               "to a tensor that has values already");
    EXPECT_HAS(error([&](auto&) { building.build(linear); }), "is running on this thread already");
    EXPECT_HAS(error([](auto&) { throw std::runtime_error("mine"); }), "mine");
    EXPECT_FALSE(building.build(linear)->weight.is_meta());
  });
}

}  // namespace

// An object cannot throw where it goes: the next forward or step does, once, and of a model that is being built what comes next.
TEST(Construction, AWriteIntoARegionThatReadsIsTheNextCallsError) {
  const auto write = [](auto& owner, const at::Tensor& weight) {
    const GatheredParameters region(owner, {weight});
    const torch::NoGradGuard no_grad;
    at::Tensor(weight).fill_(7);
  };
  const at::Tensor x = at::ones({4, 6});
  const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"},
      "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})");
  testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
    torch::nn::Linear net(6, 6);
    auto engine = initialize(net, config, comm::Mesh(group));
    write(engine, net->weight);
    EXPECT_HAS(testing::error_of([&] { engine.forward(x); }), "modifier_rank");
    engine.forward(x).sum().backward();
    write(engine, net->weight);
    EXPECT_HAS(testing::error_of([&] { engine.step(); }), "modifier_rank");
    EXPECT_TRUE(engine.step());
    Construction building(config, comm::Mesh(group));
    auto built = building.build([] { return torch::nn::Linear(6, 6); });
    write(building, built->weight);
    EXPECT_HAS(testing::error_of([&] { initialize(built, config, building); }), "modifier_rank");
  });
}

}  // namespace tessera::nn

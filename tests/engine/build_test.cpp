#include "tessera/engine/build.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace tessera::engine {
namespace {

TEST(Build, TakesEveryOptionFromTheConfiguration) {
  const auto config = Config::from_json(R"({
    "train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}})");
  const Options options = options_from(config, 2);
  EXPECT_EQ(options.zero.stage, 2);
  EXPECT_EQ(options.zero.precision.param, at::kBFloat16);
  EXPECT_EQ(options.rule, optim::Rule::Sgd);
  EXPECT_EQ(options.gradient_accumulation_steps, 3);
  EXPECT_EQ(options.micro_batch_size, 4);
  EXPECT_EQ(options.gradient_clipping, 0.5);
  EXPECT_TRUE(options.managed_accumulation);
  const auto early = Config::from_json(R"({"train_batch_size": 1, "gradient_clipping": 0.5,
    "tessera": {"clip": "previous", "update_in_backward": true}})");
  EXPECT_EQ(options_from(early, 1).gradient_clipping, 0) << "the backward clips";
}

TEST(Build, TakesTheLossScale) {
  const auto config = Config::from_json(R"({"train_batch_size": 1, "fp16": {"enabled": true, "loss_scale": 64}})");
  const Options options = options_from(config, 1);
  EXPECT_EQ(options.zero.precision.param, at::kHalf);
  EXPECT_EQ(options.scaler.initial, 64);
  EXPECT_FALSE(options.scaler.dynamic);
}

TEST(Build, WithoutANativeOptimizerTheClientUpdates) {
  EXPECT_EQ(options_from(Config::from_json(R"({"train_batch_size": 1})"), 1).rule, optim::Rule::External);
}

TEST(Build, BatchSizesMustFitTheRanks) {
  const auto config = Config::from_json(R"({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4})");
  EXPECT_NO_THROW(options_from(config, 1));
  EXPECT_THROW(options_from(config, 3), c10::ValueError);
}

TEST(Build, RefusesWhatIsNotServed) {
  const auto config = Config::from_json(R"({"train_batch_size": 1, "graph_harvesting": true})");
  EXPECT_THROW(options_from(config, 1), c10::NotImplementedError);
}

// Gathers have one bucket where each waits for the one before it to be used, and two where the next one is on its way
// meanwhile: whatever stage3_prefetch_bucket_size is, unless it is 0.
TEST(Build, TheNextUnitIsGatheredEarlyWhateverItsSize) {
  constexpr int64_t kSize = 1 << 17;
  struct Case {
    const char* bound;
    int buckets;
  };
  for (const Case& c : {Case{"0", 1}, Case{"1", 2}, Case{"50000000", 2}}) {
    testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
      const auto config = Config::from_json(std::string(R"({"train_batch_size": 2, "optimizer": {"type": "SGD"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": )") +
                                            c.bound + "}}");
      std::vector<ParamSpec> specs;
      for (const char* name : {"a", "b", "c"})
        specs.push_back({name, at::ones({kSize}).requires_grad_(true), 0, name});
      Options options = options_from(config, 2);
      options.zero.min_unit_elements = 1;
      Engine engine(options, comm::Mesh(group), specs, {{}});
      zero::Modules& modules = engine.modules();
      const int whole = modules.add({});
      const std::vector<int> layers{modules.add({0}), modules.add({1}), modules.add({2})};
      const at::NoGradGuard no_grad;
      for (int pass = 0; pass < 2; ++pass) {
        modules.enter(whole);
        for (int i = 0; i < 3; ++i) {
          modules.enter(layers[i]);
          EXPECT_EQ(specs[i].tensor.sum().item<double>(), kSize);
          modules.leave(layers[i], {});
        }
        modules.leave(whole, {});
      }
      EXPECT_EQ(engine.memory().peak_buckets, c.buckets * kSize * 4) << c.bound;
    });
  }
}

}  // namespace
}  // namespace tessera::engine

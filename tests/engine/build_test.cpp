#include "tessera/engine/build.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera::engine

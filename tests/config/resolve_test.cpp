#include "tessera/config/resolve.h"

#include "support.h"

namespace tessera::config {
namespace {

TEST(Resolve, LossScale) {
  EXPECT_FALSE(amp::GradScaler(scaler_options(Config{})).needed());
  EXPECT_FALSE(amp::GradScaler(scaler_options(Config::from_json(R"({"bf16": {"enabled": true}})"))).needed());
  EXPECT_FALSE(amp::GradScaler(scaler_options(Config::from_json(R"({"fp16": {"loss_scale": 8}})"))).needed());
  const Config fp16 = Config::from_json(R"({"fp16": {"enabled": true, "initial_scale_power": 4, "loss_scale_window": 7,
      "hysteresis": 3, "consecutive_hysteresis": true, "min_loss_scale": 2}})");
  auto options = scaler_options(fp16);
  EXPECT_TRUE(options.dynamic);
  EXPECT_EQ(options.initial, 16);
  EXPECT_EQ(options.window, 7);
  EXPECT_EQ(options.minimum, 2);
  EXPECT_EQ(options.hysteresis, 1) << "stage 0 has none";
  EXPECT_FALSE(options.refill_on_good);
  EXPECT_FALSE(options.error_at_minimum);
  Config sharded = fp16;
  sharded.zero_optimization.stage = 2;
  options = scaler_options(sharded);
  EXPECT_EQ(options.hysteresis, 3);
  EXPECT_TRUE(options.refill_on_good);
  EXPECT_TRUE(options.error_at_minimum);
  options = scaler_options(Config::from_json(R"({"fp16": {"enabled": true, "loss_scale": 128}})"));
  EXPECT_FALSE(options.dynamic);
  EXPECT_EQ(options.initial, 128);
  options = scaler_options(Config::from_json(R"({"torch_autocast": {"enabled": true, "dtype": "fp16"}})"));
  EXPECT_TRUE(options.dynamic);
  EXPECT_EQ(options.initial, 65536);
  EXPECT_EQ(options.window, 2000);
  options = scaler_options(Config::from_json(R"({"torch_autocast": {"enabled": true, "dtype": "bf16"}})"));
  EXPECT_FALSE(options.dynamic);
  EXPECT_EQ(options.initial, 1);
}

TEST(Resolve, Autocast) {
  EXPECT_FALSE(autocast_options(Config{}).enabled);
  const auto options = autocast_options(Config::from_json(R"({"torch_autocast": {"enabled": true, "dtype": "fp16"}})"));
  EXPECT_TRUE(options.enabled);
  EXPECT_EQ(options.dtype, c10::ScalarType::Half);
  EXPECT_EQ(autocast_options(Config::from_json(R"({"torch_autocast": {"enabled": true}})")).dtype,
            c10::ScalarType::BFloat16);
  EXPECT_FALSE(zero_options(Config{}).communication);
  EXPECT_EQ(zero_options(Config::from_json(R"({"communication_data_type": "fp32"})")).communication,
            c10::ScalarType::Float);
}

TEST(Resolve, ZeroOptions) {
  const auto plain = zero_options(Config{});
  EXPECT_EQ(plain.stage, 0);
  EXPECT_TRUE(plain.overlap);
  EXPECT_FALSE(plain.gradient_factor);
  EXPECT_EQ(plain.min_unit_elements, 1 << 20);
  EXPECT_FALSE(plain.share_params);
  EXPECT_FALSE(plain.home);
  const auto away = zero_options(Config::from_json(R"({"zero_optimization": {"stage": 1, "offload_optimizer":
      {"device": "nvme", "nvme_path": "/proc/none", "pin_memory": false}}})"));
  EXPECT_TRUE(away.home) << "where nothing is made before an engine asks";
  EXPECT_FALSE(away.pin_memory);
  EXPECT_FALSE(away.weight_home);
  const auto weights = zero_options(Config::from_json(R"({"zero_optimization": {"stage": 3, "offload_param":
      {"device": "nvme", "nvme_path": "/proc/none", "buffer_count": 2, "buffer_size": 1000}}})"));
  EXPECT_TRUE(weights.weight_home && !weights.home);
  EXPECT_EQ(weights.gather.ahead_units, 2);
  EXPECT_EQ(weights.gather.ahead, 2000);
  const auto options = zero_options(Config::from_json(R"({"gradient_allreduce_op": "sum",
      "zero_optimization": {"stage": 2, "reduce_bucket_size": 100, "overlap_comm": false},
      "bf16": {"enabled": true}, "tessera": {"min_unit_elements": 5, "seed": 7, "shared_parameters": true,
      "update_in_backward": true, "update_runs_on": true, "clip_by_unit": true}})"));
  EXPECT_EQ(options.stage, 2);
  EXPECT_FALSE(options.overlap);
  EXPECT_EQ(options.gradient_factor, 1.0);
  EXPECT_EQ(options.reduce_bucket_size, 100);
  EXPECT_EQ(options.min_unit_elements, 5);
  EXPECT_TRUE(options.share_params);
  EXPECT_EQ(options.precision.param, c10::ScalarType::BFloat16);
  EXPECT_EQ(options.seed, 7);
  EXPECT_TRUE(options.update_in_backward);
  EXPECT_TRUE(options.update_runs_on);
  EXPECT_EQ(options.unit_clipping, 1.0);
  const auto clips = [](const char* rule) {
    const auto found =
        zero_options(Config::from_json(std::string(R"({"gradient_clipping": 0.5, "tessera": {"clip": ")") + rule +
                                       R"(", "update_in_backward": true}})"));
    return std::pair(found.unit_clipping, found.previous_clipping);
  };
  EXPECT_EQ(clips("unit"), std::pair(0.5, 0.0));
  EXPECT_EQ(clips("previous"), std::pair(0.0, 0.5));
  const auto unmanaged = zero_options(Config::from_json(R"({"managed_gradient_accumulation": false})"));
  EXPECT_FALSE(unmanaged.overlap);
}

TEST(Resolve, NativeOptimizerAndSchedule) {
  EXPECT_FALSE(native_optimizer(Config{}));
  EXPECT_FALSE(native_schedule(Config{}));
  const Config c = Config::from_json(
      R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": {"type": "WarmupLR"}})");
  EXPECT_EQ(native_optimizer(c)->defaults.lr, 0.5);
  EXPECT_EQ(std::get<optim::WarmupLR>(*native_schedule(c)).warmup_num_steps, 1000);
  Config bad;
  bad.optimizer = {.type = "Adam", .params = {{"lr", "fast"}}};
  EXPECT_HAS(error_of([&] { native_optimizer(bad); }), "optimizer.params.lr");
}

TEST(Resolve, WhatNeedsAnOptimizerOrWholeParameters) {
  const auto of_stage = [](int stage, const char* more = "") {
    return Config::from_json(c10::str(R"({"zero_optimization": {"stage": )", stage, "}", more, "}"));
  };
  for (int stage = 0; stage <= 3; ++stage)
    EXPECT_EQ(error_of([&] { check_without_optimizer(of_stage(stage)); }).empty(), stage == 0 || stage == 3);
  const auto error = [&](int stage, bool is_cut, const char* more = "") {
    return error_of([&] { refuse_slices(of_stage(stage, more), "Mine", is_cut); });
  };
  const std::string begin = "[initialize] Mine is not known to work on slices of parameters, as ";
  EXPECT_EQ(error(0, false), "");
  EXPECT_HAS(error(1, false), begin + "stage 1 gives them; set");
  EXPECT_HAS(error(0, true), begin + "tensor_parallel.autotp_size gives them; set");
  EXPECT_HAS(error(2, true), begin + "stage 2 and tensor_parallel.autotp_size give them; set");
  EXPECT_HAS(error(2, true), "or use stage 0 without tensor parallelism");
  EXPECT_EQ(error(2, true, R"(, "zero_allow_untested_optimizer": true)"), "");
}

}  // namespace
}  // namespace tessera::config

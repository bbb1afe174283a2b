#include "tessera/config/resolve.h"

#include "tessera/config/params.h"

namespace tessera::config {

amp::PrecisionPolicy precision(const Config& config) {
  auto policy =
      config.bf16.enabled ? amp::PrecisionPolicy::bf16(config.bf16.check_grad_overflow) : amp::PrecisionPolicy::fp32();
  policy.grad = config.data_types.grad_accum_dtype.value_or(policy.grad);
  return policy;
}

zero::Options zero_options(const Config& config) {
  const ZeroOptimization& zero = config.zero_optimization;
  zero::Options options;
  options.stage = int(zero.stage);
  options.precision = precision(config);
  options.reduce_bucket_size = zero.reduce_bucket_size;
  options.min_unit_elements = config.tessera.min_unit_elements;
  options.average = config.gradient_allreduce_op == GradientOp::Mean;
  options.gather.prefetch = zero.stage3_prefetch_bucket_size;
  options.gather.max_live = zero.stage3_max_live_parameters;
  options.gather.persistence_threshold = zero.stage3_param_persistence_threshold;
  options.gather.model_persistence = zero.stage3_model_persistence_threshold;
  // DeepSpeed's default keeps models of up to 1e9 parameters gathered from forward to backward: only where asked for.
  if (config.given.contains("zero_optimization.stage3_max_reuse_distance")) {
    options.gather.reuse_distance = zero.stage3_max_reuse_distance;
  }
  options.reduce_at_step = !config.managed_gradient_accumulation;
  const bool possible = config.managed_gradient_accumulation || zero.stage >= 2;
  options.overlap = possible && zero.overlap_comm.value_or(true);
  return options;
}

std::optional<optim::OptimizerOptions> native_optimizer(const Config& config) {
  Report report;
  auto options = read_optimizer(config.optimizer, report);
  report.raise();
  return options;
}

std::optional<optim::ScheduleOptions> native_schedule(const Config& config) {
  Report report;
  auto options = read_schedule(config.scheduler, report);
  report.raise();
  return options;
}

}  // namespace tessera::config

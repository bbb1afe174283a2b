#include "tessera/engine/build.h"

#include "tessera/config/precision.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"

namespace tessera::engine {

Options options_from(const config::Config& config, int data_parallel_size) {
  config::check_served(config);
  Options options;
  options.zero = config::zero_options(config);
  const auto native = config::native_optimizer(config);
  options.rule = native && optim::has_kernel(native->rule) ? native->rule : optim::Rule::External;
  const config::Batch batch = config.resolve_batch(data_parallel_size);
  options.micro_batch_size = batch.micro_batch_size;
  options.gradient_accumulation_steps = batch.gradient_accumulation_steps;
  options.gradient_clipping = config::clip_rule(config) == config::Clip::Global ? config.gradient_clipping : 0;
  options.managed_accumulation = config.managed_gradient_accumulation;
  options.precision_of_model = !config::casts_model(config);
  options.sequence_communication = config.seq_parallel_communication_data_type;
  if (!config.scheduler.type.empty())
    options.schedule = config.scheduler.type + " " + config::Value(config.scheduler.params).text();
  options.time_device = config.wall_clock_breakdown;
  options.broadcast_buffers = config.tessera.broadcast_buffers;
  options.accumulate_in = config.data_types.grad_accum_dtype;
  const config::ZeroOptimization& zero = config.zero_optimization;
  // As in DeepSpeed, which looks there only.
  const bool looks =
      zero.offload_optimizer.device != config::OffloadDevice::None && (zero.stage == 1 || zero.stage == 2);
  options.wants_all_used = looks && !zero.ignore_unused_parameters && !config.tessera.update_in_backward;
  options.says_some_unused =
      zero.ignore_unused_parameters && config.given.contains("zero_optimization.ignore_unused_parameters");
  options.nvme_path = zero.offload_optimizer.nvme_path.value_or(zero.offload_param.nvme_path.value_or(""));
  options.offload = {.finds_ratio = !zero.offload_optimizer.ratio,
                     .finds_share = !config.tessera.device_share,
                     .reserve = config.tessera.device_reserve,
                     .folder = zero.offload_optimizer.device == config::OffloadDevice::Nvme ? options.nvme_path : ""};
  options.scaler = config::scaler_options(config);
  options.autocast = config::autocast_options(config);
  return options;
}

}  // namespace tessera::engine

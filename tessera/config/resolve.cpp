#include "tessera/config/resolve.h"

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/config/params.h"
#include "tessera/config/precision.h"
#include "tessera/offload/states.h"

namespace tessera::config {

const shard::StagePlacements& placements(const Config& config) {
  return shard::placements_of_stage(static_cast<int>(config.zero_optimization.stage));
}

amp::ScalerOptions scaler_options(const Config& config) {
  const Fp16& fp16 = config.fp16;
  if (!fp16.enabled) {
    const bool autocast = config.torch_autocast.enabled && config.torch_autocast.dtype == c10::ScalarType::Half;
    return autocast ? amp::ScalerOptions::autocast() : amp::ScalerOptions::off();
  }
  if (fp16.loss_scale > 0) return amp::ScalerOptions::fixed(fp16.loss_scale);
  const bool zero = placements(config).shards_states();
  return {.dynamic = true,
          .initial = std::exp2(static_cast<double>(fp16.initial_scale_power)),
          .window = fp16.loss_scale_window,
          .late_growth = true,
          .hysteresis = zero ? std::max<int64_t>(1, fp16.hysteresis) : 1,
          .refill_on_good = zero && fp16.consecutive_hysteresis,
          .minimum = static_cast<double>(fp16.min_loss_scale),
          .error_at_minimum = zero};
}

amp::AutocastOptions autocast_options(const Config& config) {
  return {config.torch_autocast.enabled, config.torch_autocast.dtype.value_or(c10::ScalarType::BFloat16)};
}

namespace {

offload::StateOptions offload_options(const OffloadOptimizer& section) {
  const bool nvme = section.device == OffloadDevice::Nvme;
  return {.residence = nvme ? shard::Residence::Nvme : shard::Residence::Host,
          .folder = section.nvme_path.value_or(""),
          .buffer_count = section.buffer_count};
}

offload::StateOptions offload_options(const OffloadParam& section) {
  const bool nvme = section.device == OffloadDevice::Nvme;
  return {.residence = nvme ? shard::Residence::Nvme : shard::Residence::Host,
          .folder = section.nvme_path.value_or(""),
          .buffer_count = section.buffer_count,
          .in_memory = nvme ? section.max_in_cpu : 0,
          .pin_memory = section.pin_memory,
          .what = "parameters"};
}

}  // namespace

Clip clip_rule(const Config& config) {
  const std::string name = config.tessera.clip.value_or(config.tessera.clip_by_unit ? "unit" : "global");
  return name == "unit" ? Clip::Unit : name == "previous" ? Clip::Previous : Clip::Global;
}

zero::Options zero_options(const Config& config) {
  const ZeroOptimization& zero = config.zero_optimization;
  zero::Options options;
  options.stage = int(zero.stage);
  options.precision = precision(config);
  options.seed = static_cast<uint64_t>(config.tessera.seed);
  options.reduce_bucket_size = zero.reduce_bucket_size;
  options.min_unit_elements = config.tessera.min_unit_elements;
  options.share_params = config.tessera.shared_parameters;
  options.update_in_backward = config.tessera.update_in_backward;
  options.update_runs_on = config.tessera.update_runs_on;
  if (clip_rule(config) == Clip::Unit) options.unit_clipping = config.gradient_clipping;
  if (clip_rule(config) == Clip::Previous) options.previous_clipping = config.gradient_clipping;
  if (config.gradient_allreduce_op != GradientOp::Mean) options.gradient_factor = 1.0;
  options.communication = config.communication_data_type;
  options.gather.prefetch = zero.stage3_prefetch_bucket_size > 0;
  options.gather.max_live = zero.stage3_max_live_parameters;
  options.gather.persistence_threshold = zero.stage3_param_persistence_threshold;
  options.gather.model_persistence = zero.stage3_model_persistence_threshold;
  // DeepSpeed's default keeps models of up to 1e9 parameters gathered from forward to backward: only where the key is given.
  if (config.given.contains("zero_optimization.stage3_max_reuse_distance")) {
    options.gather.reuse_distance = zero.stage3_max_reuse_distance;
  }
  if (zero.offload_optimizer.device != OffloadDevice::None) {
    offload::StateOptions states = offload_options(zero.offload_optimizer);
    // The host updates states where they are; 16-bit states pass through the device, and so may some of 32 bits.
    const bool narrow = options.precision.states_are_narrow();
    states.pin_memory = zero.offload_optimizer.pin_memory && narrow;
    states.pin_asked = zero.offload_optimizer.pin_memory && !narrow && config.tessera.device_share != 0.0;
    options.home = offload::state_homes(std::move(states));
    options.pin_memory = zero.offload_optimizer.pin_memory;
    options.ratio = zero.offload_optimizer.ratio.value_or(1);
    options.device_share = config.tessera.device_share.value_or(0);
  }
  if (zero.offload_param.device != OffloadDevice::None && placements(config).shards_params()) {
    options.weight_home = offload::state_homes(offload_options(zero.offload_param));
    options.gather.ahead_units = static_cast<int>(std::min<int64_t>(zero.offload_param.buffer_count, 1 << 20));
    options.gather.ahead =
        std::min<int64_t>(zero.offload_param.buffer_size, int64_t{1} << 40) * options.gather.ahead_units;
  }
  const bool possible =
      config.managed_gradient_accumulation || placements(config).reduce_at == shard::ReduceAt::EveryBackward;
  options.overlap = possible && zero.overlap_comm.value_or(true);
  return options;
}

std::optional<optim::OptimizerOptions> native_optimizer(const Config& config) {
  Report report;
  auto options = read_optimizer(config.optimizer, report);
  report.raise();
  return options;
}

std::optional<optim::OptimizerOptions> torch_optimizer(const Config& config) {
  Report report;
  if (read_optimizer(config.optimizer, report)) return std::nullopt;
  auto options = read_torch_optimizer(config.optimizer, report);
  if (options) refuse_outside_python(config.optimizer, *options->type, report);
  report.raise();
  return options;
}

std::optional<optim::OptimizerOptions> optimizer_kind(const Config& config) {
  return kind_of(config.optimizer);
}

namespace {

std::string where_it_runs(const std::string& type, const std::vector<std::string>& in_python,
                          const std::vector<std::string>& all) {
  if (type.empty()) return "";
  if (std::ranges::find(in_python, type) != in_python.end()) return " (" + type + " does in Python only)";
  const std::string near = nearest(type, all);
  return " ('" + type + "' is none" + (near.empty() ? "" : ": did you mean \"" + near + "\"?") + ")";
}

}  // namespace

std::string where_optimizer_runs(const std::string& type) {
  std::vector<std::string> all = optimizer_types();
  all.insert(all.end(), {"RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"});
  return where_it_runs(type, {}, all);
}

std::string where_schedule_runs(const std::string& type) {
  // Of torch.optim.lr_scheduler.
  static const std::vector<std::string> in_python{"LambdaLR", "MultiplicativeLR", "ReduceLROnPlateau"};
  return where_it_runs(type, in_python, optim::schedule_names());
}

std::string cpp_schedules() {
  return join(optim::schedule_names(), ", ");
}

void check_without_optimizer(const Config& config) {
  const shard::StagePlacements& where = placements(config);
  TESSERA_CHECK_VALUE(!where.shards_states() || where.shards_params(), "initialize", "zero_optimization.stage ",
                      static_cast<int>(config.zero_optimization.stage),
                      " requires an optimizer; pass one or use stage 0");
}

void refuse_slices(const Config& config, const std::string& name, bool is_cut) {
  std::vector<std::string> cuts;
  if (placements(config).shards_states()) cuts.push_back(c10::str("stage ", config.zero_optimization.stage));
  if (is_cut) cuts.emplace_back("tensor_parallel.autotp_size");
  TESSERA_CHECK_VALUE(cuts.empty() || config.zero_allow_untested_optimizer, "initialize", name,
                      " is not known to work on slices of parameters, as ", join(cuts, " and "),
                      cuts.size() > 1 ? " give" : " gives",
                      " them; set \"zero_allow_untested_optimizer\": true if it updates element by element, or use "
                      "stage 0",
                      is_cut ? " without tensor parallelism" : "");
}

void refuse_class(const std::string& name) {
  TESSERA_CHECK_BUILT(name != "LBFGS", "initialize",
                      "torch's LBFGS needs a closure, which engine.step() does not take");
  TESSERA_CHECK_BUILT(name != "SparseAdam", "initialize",
                      "torch's SparseAdam takes sparse gradients only, and an engine's are dense, those of sparse "
                      "embeddings too; use Adam or AdamW");
}

void refuse_rounding(const std::string& name) {
  TESSERA_CHECK_VALUE(false, "initialize", "stochastic_rounding of ", name,
                      " is for programs without an engine; an engine rounds as tessera.rounding of its configuration "
                      "says");
}

std::optional<optim::ScheduleOptions> native_schedule(const Config& config) {
  Report report;
  auto options = read_schedule(config.scheduler, report);
  report.raise();
  return options;
}

}  // namespace tessera::config

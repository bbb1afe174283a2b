#include "tessera/config/rules.h"

#include <algorithm>
#include <limits>

#include "tessera/config/elastic.h"
#include "tessera/config/lookup.h"
#include "tessera/config/params.h"
#include "tessera/config/partition_rules.h"
#include "tessera/config/precision.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"

namespace tessera::config {
namespace {

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void check_amp(const Config& c, Report& report) {
  const bool amp = has(c.foreign_sections, "amp");
  if (amp && c.zero_optimization.stage > 0) {
    report.error("amp", "cannot be combined with zero_optimization");
  }
  if (amp && (c.fp16.enabled || c.bf16.enabled)) {
    report.error("amp", "cannot be combined with fp16 or bf16");
  }
}

// Checks that a loss scale fits fp32, in which gradients are divided.
void check_loss_scale_fits(const Config& c, Report& report) {
  if (!c.fp16.enabled) {
    return;
  }
  if (c.fp16.loss_scale > std::numeric_limits<float>::max()) {
    report.error("fp16.loss_scale", "must fit fp32");
  }
  constexpr int64_t largest = std::numeric_limits<float>::max_exponent - 1;
  if (c.fp16.loss_scale == 0 && c.fp16.initial_scale_power > largest) {
    report.error("fp16.initial_scale_power",
                 "must be at most " + std::to_string(largest) + ", got " + std::to_string(c.fp16.initial_scale_power));
  }
}

void check_loss_scale(const Config& c, Report& report) {
  check_loss_scale_fits(c, report);
  // Unused values are tolerated: clients write them whatever the mode.
  if (!c.fp16.enabled || c.fp16.loss_scale != 0) {
    return;
  }
  for (const auto& [name, value] :
       {std::pair("loss_scale_window", c.fp16.loss_scale_window), std::pair("min_loss_scale", c.fp16.min_loss_scale)}) {
    if (value <= 0) {
      report.error(std::string("fp16.") + name,
                   "must be an integer >= 1 with a dynamic loss scale, got " + std::to_string(value));
    }
  }
}

// The allowed rows of the low-precision states; they hold whether or not the section is enabled.
void check_low_precision_states(const Config& c, Report& report) {
  const bool bf16_master = c.bf16.bf16_master_weights_and_grads;
  const bool bf16_states = c.bf16.bf16_optimizer_states;
  const bool fp16_master = c.fp16.fp16_master_weights_and_grads;
  const bool away = c.zero_optimization.offload_optimizer.device != OffloadDevice::None;
  const auto check = [&](bool bad, const char* path, const char* text) {
    if (bad) {
      report.error(path, text);
    }
  };
  const bool plain = c.zero_optimization.stage == 0;
  check(bf16_master && plain, "bf16.bf16_master_weights_and_grads", "needs zero_optimization.stage 1, 2 or 3");
  check(bf16_states && plain, "bf16.bf16_optimizer_states", "needs zero_optimization.stage 1, 2 or 3");
  check(fp16_master && plain, "fp16.fp16_master_weights_and_grads", "needs zero_optimization.stage 1, 2 or 3");
  check(bf16_master && fp16_master, "fp16.fp16_master_weights_and_grads",
        "cannot be combined with bf16.bf16_master_weights_and_grads");
  check(bf16_states && !bf16_master, "bf16.bf16_optimizer_states", "needs bf16_master_weights_and_grads");
  // Fp32 moments beside 16-bit masters on the device are only for who asks for them by the bytes.
  const bool on_device = c.tessera.state_bytes.value_or(0) == 12;
  check(
      bf16_master && !bf16_states && !away && !on_device, "bf16.bf16_master_weights_and_grads",
      "needs bf16_optimizer_states, zero_optimization.offload_optimizer.device cpu or nvme, or tessera.state_bytes 12 "
      "(fp32 moments on the device)");
  check(fp16_master && !away && !on_device, "fp16.fp16_master_weights_and_grads",
        "needs zero_optimization.offload_optimizer.device cpu or nvme, or tessera.state_bytes 12 (fp32 moments on the "
        "device)");
}

void check_zero(const Config& c, Report& report) {
  const ZeroOptimization& zero = c.zero_optimization;
  if (zero.legacy_stage1) {
    report.error("zero_optimization.legacy_stage1", "is no longer there; remove it");
  }
  if ((zero.stage == 1 || zero.stage == 2) && zero.allgather_bucket_size % 2 != 0) {
    report.error("zero_optimization.allgather_bucket_size",
                 "must be a multiple of nccl_start_alignment_factor (2) in stages 1 and 2, got " +
                     std::to_string(zero.allgather_bucket_size));
  }
  const OffloadOptimizer& offload = zero.offload_optimizer;
  if (offload.device != OffloadDevice::None && zero.stage == 0) {
    report.error("zero_optimization.offload_optimizer.device",
                 "needs stage 1, 2 or 3; with one rank they are plain training");
  }
  if (offload.device == OffloadDevice::Nvme && offload.nvme_path.value_or("").empty()) {
    report.error("zero_optimization.offload_optimizer.nvme_path", "is missing: device nvme needs a folder on the disk");
  }
  if (zero.offload_param.device != OffloadDevice::None && zero.stage != 3) {
    report.warning("zero_optimization.offload_param.device", "has no effect: only stage 3 partitions parameters");
  } else if (zero.offload_param.device != OffloadDevice::None && c.tessera.shared_parameters) {
    report.error("zero_optimization.offload_param.device", "cannot be combined with tessera.shared_parameters");
  } else if (zero.offload_param.device == OffloadDevice::Nvme && zero.offload_param.nvme_path.value_or("").empty()) {
    report.error("zero_optimization.offload_param.nvme_path", "is missing: device nvme needs a folder on the disk");
  }
  if (zero.stage >= 2 && zero.reduce_scatter) {
    if (c.prescale_gradients) {
      report.error("prescale_gradients", "needs zero_optimization.reduce_scatter false in stages 2 and 3");
    }
    if (c.gradient_predivide_factor != 1.0) {
      report.error("gradient_predivide_factor",
                   "other than 1.0 needs zero_optimization.reduce_scatter false in stages 2 and 3");
    }
  }
  if (c.torch_autocast.enabled && zero.zero_quantized_weights) {
    report.error("torch_autocast.enabled", "cannot be combined with zero_optimization.zero_quantized_weights");
  }
}

void check_gradient_op(const Config& c, Report& report) {
  if (c.gradient_allreduce_op != GradientOp::Sum) {
    return;
  }
  const bool zenflow = has(c.foreign_sections, "zenflow") || has(c.foreign_sections, "zero_optimization.zenflow");
  if (c.zero_optimization.stage == 3 || zenflow || c.compile.deepcompile) {
    report.error("gradient_allreduce_op", "sum cannot be combined with stage 3, zenflow or deepcompile; use mean");
  }
}

void check_unmanaged(const Config& c, Report& report) {
  if (c.managed_gradient_accumulation) {
    return;
  }
  const auto refuse = [&](bool bad, const std::string& with) {
    if (bad) {
      report.error("managed_gradient_accumulation", "false cannot be combined with " + with);
    }
  };
  refuse(c.zero_optimization.overlap_comm.value_or(false) && c.zero_optimization.stage < 2,
         "zero_optimization.overlap_comm in stages 0 and 1");
  refuse(c.compile.deepcompile, "compile.deepcompile");
  refuse(has(c.foreign_sections, "amp"), "amp");
}

void check_optimizer(const Config& c, Report& report) {
  if (!read_optimizer(c.optimizer, report)) read_torch_optimizer(c.optimizer, report);
  read_schedule(c.scheduler, report);
  if (c.optimizer.type.empty() && !c.optimizer.params.empty()) {
    report.error("optimizer.type", "is required beside optimizer.params");
  }
  if (c.scheduler.type.empty() && !c.scheduler.params.empty()) {
    report.error("scheduler.type", "is required beside scheduler.params");
  }
  const int64_t stage = c.zero_optimization.stage;
  const std::string type = lower(c.optimizer.type);
  const bool one_bit = type.starts_with("onebit") || type.starts_with("zeroone");
  if (stage > 0 && one_bit) {
    report.error("optimizer.type", c.optimizer.type + " cannot be combined with zero_optimization");
  } else if (stage > 0 && !type.empty() && optim::find_type(type) == nullptr && !c.zero_allow_untested_optimizer) {
    const std::string near = nearest(type, optimizer_types());
    report.error("optimizer.type", c.optimizer.type + " has no native rule" +
                                       (near.empty() ? "" : " (did you mean \"" + near + "\"?)") +
                                       "; under zero_optimization set zero_allow_untested_optimizer to true to use it");
  }
  if (type == "lamb" && c.fp16.enabled && c.fp16.loss_scale != 0) {
    report.error("optimizer.type", "Lamb needs a dynamic loss scale (fp16.loss_scale 0)");
  }
  const bool offload = c.zero_optimization.offload_optimizer.device != OffloadDevice::None;
  if (type == "muon" && c.zero_optimization.reduce_scatter && (stage == 3 || (stage > 0 && offload))) {
    report.error("zero_optimization.reduce_scatter", "must be false for Muon in stage 3 or with offload");
  }
}

void check_clipping(const Config& c, Report& report) {
  const Own& own = c.tessera;
  const char* key = own.clip ? "tessera.clip" : "tessera.clip_by_unit";
  if (own.clip_by_unit && own.clip.value_or("unit") != "unit") {
    report.error(key, "is \"" + *own.clip + "\" beside clip_by_unit, which means \"unit\"; keep one");
  } else if (clip_rule(c) != Clip::Global && !own.update_in_backward) {
    report.error(key, "needs tessera.update_in_backward; gradient_clipping alone clips by the global norm");
  }
}

void check_tensor_parallel(const Config& c, Report& report) {
  check_partition_keys(c, report);
  const int64_t size = c.tensor_parallel.tp.tp_size;
  if (size != 1 && size != c.tensor_parallel.autotp_size) {
    report.error("tensor_parallel.tp.tp_size", "must be 1 or autotp_size (" +
                                                   std::to_string(c.tensor_parallel.autotp_size) + "), got " +
                                                   std::to_string(size));
  }
}

}  // namespace

void check_rules(const Config& config, Report& report) {
  for (auto check :
       {check_precision, check_amp, check_loss_scale, check_low_precision_states, check_zero, check_gradient_op,
        check_unmanaged, check_optimizer, check_clipping, check_tensor_parallel, check_elasticity, warn_of_unread}) {
    check(config, report);
  }
}

}  // namespace tessera::config

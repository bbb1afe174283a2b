#include "tessera/config/precision.h"

#include <algorithm>
#include <array>

#include "tessera/config/lookup.h"

namespace tessera::config {
namespace {

using amp::Master;
using c10::ScalarType;

// A row of tessera.state_bytes: weight and gradient in `param`, what the master adds to the weight, and two moments.
struct Mode {
  ScalarType param;
  int64_t bytes;
  Master master;
  ScalarType state;
};
constexpr std::array kModes{
    Mode{ScalarType::Float, 16, Master::Weight, ScalarType::Float},
    Mode{ScalarType::BFloat16, 16, Master::Fp32, ScalarType::Float},
    Mode{ScalarType::BFloat16, 14, Master::Split, ScalarType::Float},
    Mode{ScalarType::BFloat16, 12, Master::Weight, ScalarType::Float},
    Mode{ScalarType::BFloat16, 10, Master::Split, ScalarType::BFloat16},
    Mode{ScalarType::BFloat16, 8, Master::Weight, ScalarType::BFloat16},
    Mode{ScalarType::Half, 16, Master::Fp32, ScalarType::Float},
    Mode{ScalarType::Half, 12, Master::Weight, ScalarType::Float},
};

ScalarType param_dtype(const Config& c) {
  if (c.fp16.enabled) return ScalarType::Half;
  return c.bf16.enabled ? ScalarType::BFloat16 : ScalarType::Float;
}

bool rounds_to_nearest(const Config& c) {
  return c.tessera.rounding.value_or("stochastic") == "nearest";
}

// The bytes where the configuration does not say: what DeepSpeed's keys mean, at the quality of fp32 masters.
int64_t default_bytes(const Config& c) {
  if (c.fp16.enabled) return c.fp16.fp16_master_weights_and_grads ? 12 : 16;
  if (!c.bf16.enabled) return 16;
  if (!c.bf16.bf16_master_weights_and_grads) return 14;
  if (!c.bf16.bf16_optimizer_states) return 12;
  return rounds_to_nearest(c) ? 8 : 10;
}

const Mode* find_mode(ScalarType param, int64_t bytes) {
  const auto* const mode =
      std::find_if(kModes.begin(), kModes.end(), [&](const Mode& m) { return m.param == param && m.bytes == bytes; });
  return mode == kModes.end() ? nullptr : &*mode;
}

// Whether a mode holds more than the section asks for.
bool contradicts_section(const Config& c, int64_t bytes) {
  if (c.bf16.enabled && c.bf16.bf16_optimizer_states) return bytes > 10;
  if (c.bf16.enabled && c.bf16.bf16_master_weights_and_grads) return bytes != 12;
  return c.fp16.enabled && c.fp16.fp16_master_weights_and_grads && bytes != 12;
}

}  // namespace

amp::PrecisionPolicy precision(const Config& c) {
  const ScalarType param = param_dtype(c);
  const Mode* mode = find_mode(param, c.tessera.state_bytes.value_or(default_bytes(c)));
  TORCH_INTERNAL_ASSERT(mode != nullptr, "a validated configuration names a mode");
  amp::PrecisionPolicy policy;
  policy.param = mode->param;
  policy.grad = c.data_types.grad_accum_dtype.value_or(mode->param);
  policy.master = mode->master;
  policy.state = mode->state;
  policy.rounding = rounds_to_nearest(c) ? kernels::Rounding::Nearest : kernels::Rounding::Stochastic;
  policy.grad_rounding =
      c.tessera.rounding == "stochastic" ? kernels::Rounding::Stochastic : kernels::Rounding::Nearest;
  policy.skip_nonfinite = c.fp16.enabled || (c.bf16.enabled && c.bf16.check_grad_overflow);
  return policy;
}

bool casts_model(const Config& c) {
  return c.fp16.enabled || c.bf16.enabled || c.tessera.state_bytes.has_value();
}

void check_precision(const Config& c, Report& report) {
  if (c.fp16.enabled && c.bf16.enabled) {
    report.error("fp16.enabled", "fp16 and bf16 cannot be enabled together");
    return;
  }
  const ScalarType param = param_dtype(c);
  if (c.data_types.param_dtype.value_or(param) != param) {
    report.error("data_types.param_dtype", "may only restate the dtype of the precision mode, " + dtype_name(param) +
                                               "; enable bf16 or fp16 instead");
  }
  if (!c.bf16.enabled && c.bf16.bf16_master_weights_and_grads) {
    report.warning("bf16.bf16_master_weights_and_grads", "has no effect while bf16.enabled is false");
  }
  if (!c.tessera.state_bytes) return;
  const int64_t bytes = *c.tessera.state_bytes;
  if (find_mode(param, bytes) == nullptr) {
    std::vector<std::string> allowed;
    for (const Mode& mode : kModes) {
      if (mode.param == param) allowed.push_back(std::to_string(mode.bytes));
    }
    report.error("tessera.state_bytes", "with " + dtype_name(param) + " parameters must be " + join(allowed, ", ") +
                                            "; got " + std::to_string(bytes));
  } else if (contradicts_section(c, bytes)) {
    report.error("tessera.state_bytes",
                 std::to_string(bytes) + " contradicts the low-precision states that the section asks for");
  }
}

}  // namespace tessera::config

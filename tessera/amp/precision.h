// PrecisionPolicy: which dtype each representation of a parameter has, and how values are rounded into it. One
// validated record; nothing else in the engine asks which precision mode is on.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::amp {

// Where the value is that the optimizer updates.
enum class Master : uint8_t {
  Weight,  // in the compute parameter itself
  Fp32,    // in an fp32 copy; the compute parameter is its nearest value
  Split,   // bf16 compute parameter and 16-bit residual together are an exact fp32 value (kernels/split.h)
};

struct PrecisionPolicy {
  at::ScalarType param = at::kFloat;  // compute parameters: what the module computes with
  at::ScalarType grad = at::kFloat;   // flat gradient: where micro-batches accumulate, and what is reduced
  Master master = Master::Weight;
  at::ScalarType state = at::kFloat;  // moments
  // Rounding into 16-bit weights that are their own master and 16-bit states. The copy of an fp32 master is the nearest value in
  // any mode, and a split master is exact.
  kernels::Rounding rounding = kernels::Rounding::Nearest;
  // Rounding into 16-bit gradients that accumulate. Nearest, as torch's, is closer to the sum of a few micro-batches.
  kernels::Rounding grad_rounding = kernels::Rounding::Nearest;
  bool skip_nonfinite = false;  // a step with inf or NaN gradients is skipped (agreed on all ranks)

  // Whether the compute parameter itself is the master: nothing extra is stored.
  bool master_is_param() const { return master == Master::Weight; }
  // Whether updates take random bits: what they write is rounded stochastically.
  bool update_is_random() const {
    const bool rounds = at::elementSize(state) == 2 || (master_is_param() && at::elementSize(param) == 2);
    return rounding == kernels::Rounding::Stochastic && rounds;
  }
  // Whether nothing beside the weight has more than 16 bits.
  bool states_are_narrow() const { return master != Master::Fp32 && at::elementSize(state) == 2; }
  // Bytes of weight, gradient, master and so many states together.
  int64_t bytes_per_parameter(int64_t states = 2) const {
    const auto size = [](at::ScalarType dtype) { return static_cast<int64_t>(at::elementSize(dtype)); };
    const int64_t extra = master == Master::Fp32 ? 4 : (master == Master::Split ? 2 : 0);
    return size(param) + size(grad) + extra + states * size(state);
  }

  static PrecisionPolicy fp32() { return {}; }
  // bf16 weights and gradients; the exact mode, 14 bytes a parameter.
  static PrecisionPolicy bf16(bool check_overflow = true) {
    PrecisionPolicy policy{at::kBFloat16, at::kBFloat16, Master::Split};
    policy.rounding = kernels::Rounding::Stochastic;
    policy.skip_nonfinite = check_overflow;
    return policy;
  }
  // fp16 weights and gradients with an fp32 master (fp16 values cannot be split), 16 bytes; needs a loss scale.
  static PrecisionPolicy fp16() {
    PrecisionPolicy policy{at::kHalf, at::kHalf, Master::Fp32};
    policy.rounding = kernels::Rounding::Stochastic;
    policy.skip_nonfinite = true;
    return policy;
  }
};

// Value error, which says what would do, unless:
//   param   fp32, bf16 or fp16
//   grad    fp32, bf16 or fp16, whatever the param is
//   master  Weight with fp32 parameters; Split with bf16 ones only
//   state   fp32, or bf16 where param is not fp16: fp16 is for processors without bf16
void check(const PrecisionPolicy& policy);

}  // namespace tessera::amp

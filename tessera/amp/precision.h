// PrecisionPolicy: which dtype each representation of a parameter has. One validated record; nothing else in the
// engine asks which precision mode is on.
#pragma once

#include <c10/core/ScalarType.h>

namespace tessera::amp {

struct PrecisionPolicy {
  at::ScalarType param = at::kFloat;   // compute parameters: what the module computes with
  at::ScalarType grad = at::kFloat;    // flat gradient: where micro-batches accumulate, and what is reduced
  at::ScalarType master = at::kFloat;  // what the optimizer updates
  bool skip_nonfinite = false;         // a step with inf or NaN gradients is skipped (agreed on all ranks)

  // True where the compute parameter itself is the master: nothing extra is stored.
  bool master_is_param() const { return param == master; }

  // fp32: 4 + 4 + 0 bytes a parameter besides the moments. bf16 and fp16: 2 + 2 + 4.
  static PrecisionPolicy fp32() { return {}; }
  static PrecisionPolicy bf16(bool check_overflow = true) {
    return {at::kBFloat16, at::kBFloat16, at::kFloat, check_overflow};
  }
  static PrecisionPolicy fp16() { return {at::kHalf, at::kHalf, at::kFloat, true}; }
};

}  // namespace tessera::amp

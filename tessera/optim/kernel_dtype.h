// Tensor dtypes in the kernels' terms.
#pragma once

#include <c10/core/ScalarType.h>

#include "tessera/base/error.h"
#include "tessera/kernels/types.h"

namespace tessera::optim {

// Value error for types that the kernels do not know.
inline kernels::DType kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::DType::F32;
    case at::kBFloat16:
      return kernels::DType::BF16;
    case at::kHalf:
      return kernels::DType::F16;
    default:
      TESSERA_CHECK_VALUE(false, "optim", "expected float32, bfloat16 or float16, got ", dtype);
  }
}

}  // namespace tessera::optim

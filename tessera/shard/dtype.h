// Torch dtypes as kernel dtypes, and the element-wise kernels on contiguous tensors, split over threads.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/types.h"

namespace tessera::shard {

// Not-implemented error for a dtype or device without kernels.
kernels::DType kernel_dtype(at::ScalarType dtype);
void check_device(c10::Device device);

// dst = scale * src and dst += scale * src over contiguous CPU tensors of equal length (kernels/elementwise.h).
void scaled_copy(const at::Tensor& dst, const at::Tensor& src, double scale = 1.0);
void scaled_add(const at::Tensor& dst, const at::Tensor& src, double scale = 1.0);
void fill_zero(const at::Tensor& dst);

}  // namespace tessera::shard

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
// The same on raw memory: no tensor is made (a view costs more than the work on a small parameter).
struct Memory {
  void* data = nullptr;
  kernels::DType dtype = kernels::DType::F32;
};
void scaled_copy(Memory dst, Memory src, double scale, int64_t n);
void scaled_add(Memory dst, Memory src, double scale, int64_t n);
// Element `offset` of a contiguous tensor and what follows.
Memory memory_of(const at::Tensor& tensor, int64_t offset = 0);
void fill_zero(const at::Tensor& dst);

}  // namespace tessera::shard

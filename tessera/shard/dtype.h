// Torch dtypes as kernel dtypes, and the element-wise kernels on contiguous tensors: split over threads on the CPU, in order
// of the current stream on a device (device.h). All tensors of a call are on one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "tessera/kernels/types.h"

namespace tessera::shard {

// Not-implemented error for a dtype without kernels.
kernels::DType kernel_dtype(at::ScalarType dtype);

// Key of stochastic rounding into a 16-bit destination, whose element 0 has global index `first`; unset: rounding to nearest.
using Random = std::optional<kernels::RandomKey>;

// dst = scale * src and dst += scale * src over contiguous tensors of equal length (kernels/elementwise.h).
void scaled_copy(const at::Tensor& dst, const at::Tensor& src, double scale = 1.0, const Random& random = {});
void scaled_add(const at::Tensor& dst, const at::Tensor& src, double scale = 1.0, const Random& random = {});
// fp32 `from` as a bf16 weight and an int16 residual, and back (kernels/split.h). Contiguous tensors of equal
// length; value error for other dtypes.
void split_master(const at::Tensor& weight, const at::Tensor& residual, const at::Tensor& from);
void join_master(const at::Tensor& to, const at::Tensor& weight, const at::Tensor& residual);
// scaled_copy and scaled_add on raw memory: no tensor is made (a view costs more than the work on a small parameter).
struct Memory {
  void* data = nullptr;
  kernels::DType dtype = kernels::DType::F32;
  c10::Device device = at::kCPU;
};
void scaled_copy(Memory dst, Memory src, double scale, int64_t n, const Random& random = {});
void scaled_add(Memory dst, Memory src, double scale, int64_t n, const Random& random = {});
// The memory from element `offset` of a contiguous tensor on.
Memory memory_of(const at::Tensor& tensor, int64_t offset = 0);
void fill_zero(const at::Tensor& dst);

}  // namespace tessera::shard

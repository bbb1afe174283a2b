// The kernels on CUDA devices, in a library of their own (target tessera_cuda, built where nvcc is found) that shows
// tessera_device_table() only. Contracts are those of DeviceTable; `stream` is a cudaStream_t.
#pragma once

#include <string>

#include "tessera/kernels/device_table.h"

namespace tessera::kernels::cuda {

// Why no device can be used; empty where one can.
std::string why_unusable();

bool is_captured(void* stream);

void update(const UpdateSegment<AdamRule>* segments, int64_t count, void* stream);
void update(const UpdateSegment<SgdRule>* segments, int64_t count, void* stream);
void update(const UpdateSegment<LionRule>* segments, int64_t count, void* stream);
void update(const UpdateSegment<AdagradRule>* segments, int64_t count, void* stream);

void scaled_copy(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n, void* stream);
void scaled_add(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n, void* stream);
void scaled_copy_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                            const RandomKey& random, void* stream);
void scaled_add_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                           const RandomKey& random, void* stream);

void split(void* weight_bf16, void* residual, const float* src, int64_t n, void* stream);
void join(float* dst, const void* weight_bf16, const void* residual, int64_t n, void* stream);

void sum_of_squares(const SumSegment* segments, int64_t count, void* stream);

}  // namespace tessera::kernels::cuda

extern "C" [[gnu::visibility("default")]] const tessera::kernels::DeviceTable* tessera_device_table();

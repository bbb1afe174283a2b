// The kernels on CUDA devices, in a library of their own (target tessera_cuda, built where nvcc is found). Contracts
// are those of update.h, elementwise.h and split.h, and so are the bits (a NaN's payload may differ); pointers are
// device pointers, each aligned to its element. Calls return at once: the work is done in order of `stream`, a
// cudaStream_t, on its device. std::runtime_error where a launch fails.
#pragma once

#include <string>

#include "tessera/kernels/update.h"

namespace tessera::kernels::cuda {

// Empty where a device can be used, else why not.
std::string why_unusable();

void update(const AdamRule& rule, const UpdateRange& range, float grad_scale, void* stream);
void update(const SgdRule& rule, const UpdateRange& range, float grad_scale, void* stream);
void update(const LionRule& rule, const UpdateRange& range, float grad_scale, void* stream);
void update(const AdagradRule& rule, const UpdateRange& range, float grad_scale, void* stream);

void scaled_copy(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n, void* stream);
void scaled_add(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n, void* stream);
void scaled_copy_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                            const RandomKey& random, void* stream);
void scaled_add_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                           const RandomKey& random, void* stream);

void split(void* weight_bf16, void* residual, const float* src, int64_t n, void* stream);
void join(float* dst, const void* weight_bf16, const void* residual, int64_t n, void* stream);

}  // namespace tessera::kernels::cuda

// Split master weights: a bf16 weight and a 16-bit residual that together are an fp32 value (Note [Split master] in
// convert.h). Serial, any alignment; each pointer may not overlap another. The best version for this processor runs.
#pragma once

#include <cstdint>

namespace tessera::kernels {

// Splits fp32 into halves. Exact for all finite values and infinities; a NaN stays NaN, its payload may change.
void split(void* weight_bf16, void* residual, const float* src, int64_t n);
// Joins halves into fp32.
void join(float* dst, const void* weight_bf16, const void* residual, int64_t n);

}  // namespace tessera::kernels

// Element-wise passes over gradients and weights. Serial, any alignment; callers split ranges over
// threads. The functions run the best version for this processor (table.h); every version gives the
// bits of the reference.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// dst = scale * src, or dst += scale * src. Arithmetic in fp32, one rounding (nearest even) into
// dst's type. With scale == 1 and equal types a copy keeps every bit, NaN payloads included. dst
// may be src.
void scaled_copy(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n);
void scaled_add(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n);

// Round stochastically into a 16-bit dst (Note [Stochastic rounding] in convert.h): sums of many small
// values are right in the mean, where nearest rounding would lose them. Bits of the gradient's stream; give every call
// of a step another `random.step`. fp32 dst: as without, nothing is drawn.
void scaled_copy_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                            const RandomKey& random);
void scaled_add_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                           const RandomKey& random);

// Sum of squares in double; not finite if an element is not. Element i adds to lane i % kSumLanes and the
// lanes are added in a fixed order, so the bits depend on the elements only, not on alignment or
// instruction set.
double sum_of_squares(const void* src, DType dtype, int64_t n);

}  // namespace tessera::kernels

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

// Sum of squares in double; not finite if an element is not. Element i adds to lane i % 16 and the
// lanes are added in a fixed order, so the bits depend on the elements only, not on alignment or
// instruction set.
double sum_of_squares(const void* src, DType dtype, int64_t n);

}  // namespace tessera::kernels

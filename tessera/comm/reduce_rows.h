// Element-wise reduction of one row per rank, in rank order: see Note [Order of summation] in
// group.h.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "tessera/comm/group.h"

namespace tessera::comm {

// Whether reduce_rows() takes this dtype with this reduction.
bool can_reduce(c10::ScalarType dtype, ReduceOp op);

// out[i] = op over r = 0..count-1 of rows[r][i], for i in [0, n). `out` may be one of the rows; a partial overlap is
// not allowed. count >= 1. Every processor gives the same bits, but for the payload of a NaN in fp16. Uses ATen's
// threads for large n. `total`: bytes of the result that `out` is part of, where it is not read again soon; see Note
// [Past the caches].
void reduce_rows(void* out, const void* const* rows, int count, int64_t n, c10::ScalarType dtype, ReduceOp op,
                 int64_t total = 0);

}  // namespace tessera::comm

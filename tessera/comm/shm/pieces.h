// How tensors are cut into the records of a call: helpers of op.cpp and sum.cpp.
#pragma once

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/copy_bytes.h"
#include "tessera/comm/shm/op.h"

namespace tessera::comm {

inline char* bytes_of(const at::Tensor& t) {
  return static_cast<char*>(t.mutable_data_ptr());
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Every call has a step at least, so that its record is compared with the others'.
inline int64_t steps_for(int64_t total, int64_t each) {
  return std::max<int64_t>(1, ceil_div(total, each));
}

// The part of `total` that step `step` covers when a step covers `each`; empty once there is nothing left.
struct Piece {
  int64_t begin = 0, count = 0;
};
inline Piece piece(int64_t total, int64_t each, int64_t step) {
  const int64_t begin = std::min(total, step * each);
  return {begin, std::min(each, total - begin)};
}

// Elements of `width` bytes in one of `rows` rows of a record, each row on a cache line of its own.
inline int64_t row_elements(int64_t rows, int64_t width) {
  return kRecordBytes / std::max<int64_t>(1, rows) / kLine * kLine / width;
}

// Rows for all ranks but the writer: the place of the row for rank `reader`.
inline int row_of(int reader, int writer) {
  return reader < writer ? reader : reader - 1;
}

inline OpInfo info_of(const char* name, const at::Tensor& full, Label label, ReduceOp op = ReduceOp::Sum,
                      int root = -1) {
  TESSERA_CHECK_VALUE(full.is_cpu(), "comm", name, " (", label, "): a group over shared memory takes CPU tensors, got ",
                      full.device());
  return describe_call(name, full, label, op, root);
}

// The info of a call with a list that has a tensor for each rank. Sizes that differ become part of the label, so that ranks that
// see them differently are found out.
OpInfo info_of_list(const char* name, int size, const ShmTensors& list, Label label, ReduceOp op = ReduceOp::Sum);

}  // namespace tessera::comm

// What one collective call is: used for error messages and for comparing the calls of several
// ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm {

struct OpInfo {
  const char* name = "";
  std::string label;
  int64_t bytes = 0;  // of the full buffer: `out` of all_gather, `in` of reduce_scatter, the tensor
                      // of the others
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  ReduceOp op = ReduceOp::Sum;
  int root = -1;
};

const char* reduce_op_name(ReduceOp op);

// "reduce_scatter (unit 'a', 4096 B)".
std::string describe(const OpInfo& info);
// The same with dtype, reduction and root where they apply: what ranks must agree on.
std::string describe_fully(const OpInfo& info);
// Whether two ranks may call these at the same position. Sizes of all_to_all are compared by their
// splits instead.
bool same_call(const OpInfo& a, const OpInfo& b);

// "0, 2, 3".
std::string join(const std::vector<int>& ranks);

// Throws DistBackendError "[comm] rank 1 of 4: reduce_scatter (unit 'a', 4096 B) failed after 0.52
// s: <cause>".
[[noreturn]] void throw_failed(int rank, int size, const OpInfo& info, double seconds, const std::string& cause);

}  // namespace tessera::comm

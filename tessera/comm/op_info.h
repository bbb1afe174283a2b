// What one collective call is: used for error messages and for comparing the calls of several
// ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>
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

// `full`: the buffer whose size counts.
OpInfo describe_call(const char* name, const at::Tensor& full, Label label, ReduceOp op = ReduceOp::Sum, int root = -1);

const char* reduce_op_name(ReduceOp op);

// The call as a text: "reduce_scatter (unit 'a', 4096 B)".
std::string describe(const OpInfo& info);
// describe() with dtype, reduction and root where they apply: what ranks must agree on.
std::string describe_fully(const OpInfo& info);
// Whether two ranks may make these calls at the same position. Sizes of all_to_all are compared by their
// splits instead.
bool same_call(const OpInfo& a, const OpInfo& b);
// What two calls that are the same have equal, and others different: as text, and as a
// number that is the same in every process (hashes may collide).
std::string agreement(const OpInfo& info);
uint64_t agreement_hash(const OpInfo& info);

// How the messages of disagreement() and split_disagreement() begin.
inline constexpr std::string_view kDisagreement = "the ranks disagree";
// The collective that ranks have in common at every update of an engine.
inline constexpr Label kGradientNorm = "gradient norm";
// The question of messages where ranks wait for each other in this call, or wrongly in this and in another one.
inline constexpr std::string_view kCountsQuestion =
    "do all ranks make the same number of forwards, backwards and steps, in one order? A step() more or fewer on one "
    "rank, "
    "or another set_train_batch_size(), ends so";
// "the ranks disagree: rank 0 called <a>, rank 1 called <b>", from describe_fully() of both.
std::string disagreement(int rank_a, std::string_view a, int rank_b, std::string_view b);
// "the ranks disagree: in <call> rank 0 sends 4 B to rank 1, which expects 8 B", from describe() of the sender's call.
std::string split_disagreement(std::string_view call, int from, int64_t sent, int to, int64_t expected);

// "0, 2, 3".
std::string join(const std::vector<int>& ranks);

// Throws DistBackendError "[comm] rank 1 of 4: reduce_scatter (unit 'a', 4096 B) failed after 0.52
// s: <cause>".
[[noreturn]] void throw_failed(int rank, int size, const OpInfo& info, double seconds, const std::string& cause);
// The cause that throw_failed() was given, from the text of its error; for another error its first line.
std::string cause_of(const std::exception& error);

}  // namespace tessera::comm

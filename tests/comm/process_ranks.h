// What tests whose ranks are processes share, whatever the transport.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/backends.h"
#include "tests/comm/collectives.h"
#include "tests/support/processes.h"

namespace tessera::testing {

using Environment = std::map<std::string, std::string>;
inline const Environment kShared = {{"TESSERA_TRANSPORT", "shared_memory"}};
inline const Environment kGloo = {{"TESSERA_TRANSPORT", "gloo"}};

// All end well, but the rank `lost` by SIGKILL.
inline void expect_success(const std::vector<ProcessResult>& results, int lost = -1) {
  for (int rank = 0; rank < static_cast<int>(results.size()); ++rank)
    EXPECT_EQ(results[rank].exit_code, rank == lost ? -SIGKILL : 0) << results[rank].output;
}

// How a test begins whose ranks are processes: false where it starts them, once for each of `sizes`; true in a rank.
inline bool in_ranks(const std::vector<int>& sizes, const Environment& env = {}, int lost = -1) {
  if (is_rank()) return true;
  for (const int size : sizes)
    expect_success(run_processes(size, env), lost);
  return false;
}

// Rank 2 of 3. What a rank has sent goes with it where others still read, and what has failed fails for all: nobody may
// still be in the collective before.
inline void die_once_all_have_met() {
  EXPECT_TRUE(await_marks("met", {0, 1}));
  raise(SIGKILL);
}

// The errors of ranks 0 and 1, who stay until both have theirs: one of them may be who the other asks.
inline void expect_lost_rank_2(const std::string& text, const std::string& operation, const std::string& how) {
  EXPECT_HAS(text, operation);
  EXPECT_HAS(text, "lost rank 2");
  EXPECT_HAS(text, how);
  leave_mark("told");
  EXPECT_TRUE(await_marks("told", {0, 1}));  // long before the group's timeout
}

// Three ranks of which the last is killed before an all-reduce, or inside; `how`: what the errors of the others say.
inline void lose_rank_2(bool inside, const std::string& how) {
  const auto group = comm::environment_group(std::chrono::minutes(1));
  auto t = at::ones({inside ? 6 << 20 : 100'000});
  const auto reduce = [&] { return group->all_reduce(t, comm::ReduceOp::Sum, "unit 'a'"); };
  group->barrier();
  leave_mark("met");
  if (group->rank() == 2) {
    const auto pending = inside ? std::optional(reduce()) : std::nullopt;
    die_once_all_have_met();
  }
  const auto call = c10::str("[comm] rank ", group->rank(), " of 3: all_reduce (unit 'a', ", t.nbytes(), " B) failed");
  expect_lost_rank_2(message_of<c10::DistBackendError>([&] { reduce().wait(); }), call, how);
  if (inside) return;
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier("later"); }), "lost rank 2");
}

// Two world groups of one process, with calls in flight on both that are waited for in the other order. `meet`: nobody
// ends before all have their results, for transports whose data does not outlive the sender.
inline void use_two_groups(bool meet) {
  const auto a = comm::environment_group(std::chrono::minutes(1)), b = comm::environment_group(std::chrono::minutes(1));
  auto x = at::ones({50000}), y = at::ones({50000});
  auto first = a->all_reduce(x, comm::ReduceOp::Sum), second = b->all_reduce(y, comm::ReduceOp::Sum);
  second.wait();
  first.wait();
  EXPECT_EQ(x.sum().item<float>(), 50000.0f * a->size());
  EXPECT_EQ(y.sum().item<float>(), 50000.0f * a->size());
  if (meet) a->barrier();
}

}  // namespace tessera::testing

// What tests whose ranks are processes share, whatever the transport.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "tessera/comm/backends.h"
#include "tests/support/processes.h"

namespace tessera::testing {

inline const std::map<std::string, std::string> kShared = {{"TESSERA_TRANSPORT", "shared_memory"}};

inline void expect_success(const std::vector<ProcessResult>& results) {
  for (const auto& result : results)
    EXPECT_EQ(result.exit_code, 0) << result.output;
}

// Rank 2 of 3. What a rank has sent goes with it where others still read, and what has failed fails for all: nobody may
// still be in the collective before.
inline void die_once_all_have_met() {
  EXPECT_TRUE(await_marks("met", {0, 1}));
  raise(SIGKILL);
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

// The calls that one rank has launched, as far as they may still be in flight, in a form that ranks can show each other:
// a rank that has waited for long compares them and finds who called what instead.
//
// Note [Different calls]
//   Messages between pairs carry a hash of their call in their tag (c10d_group.cpp), so ranks that make different calls
//   never exchange data: both wait. A rank that has waited for some seconds therefore puts its log on the fault board and
//   reads those of the others. Two logs that hold different calls under one number prove a mistake. All else proves
//   nothing: a rank may be late, its text may be old, and it may be at another place of its program.
//   Calls before the last completed one were agreed on, so the log is short however many calls there have been.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/op_info.h"

namespace tessera::comm {

// What an all_to_all sends to each rank and receives from it, in bytes; empty for other calls.
struct Splits {
  std::vector<int64_t> sent, received;
};

// All calls are local; any thread may make them.
class CallLog {
 public:
  explicit CallLog(int rank) : rank_(rank) {}

  // Adds a call of the group with number `instance`; returns the call's number there, from 0. Equal on all ranks.
  int64_t add(int64_t instance, OpInfo info, Splits splits = {});
  // The call is through: it and those before need not be compared again.
  void done(int64_t instance, int64_t number);

  // The log as bytes for difference() of another rank.
  std::string text() const;
  // The first call that this rank and rank `peer`, whose log said `text`, have made differently: "the ranks disagree:
  // rank 0 called ..., rank 1 called ...". A text that is cut off counts as empty.
  std::optional<std::string> difference(int peer, const std::string& text) const;

 private:
  struct Call {
    int64_t number = 0;
    OpInfo info;
    Splits splits;
  };
  struct Sequence {
    int64_t added = 0;
    std::deque<Call> calls;
  };

  const int rank_;
  mutable std::mutex mutex_;
  std::map<int64_t, Sequence> sequences_;  // by instance
};

}  // namespace tessera::comm

// CallLog: the calls that one rank has launched, as far as they may still be in flight, in a form that ranks can show each other:
// a rank that has waited for long compares them and finds who called what instead.
//
// Note [Different calls]
//   Messages between pairs carry a hash of their call in their tag (messages.h), so ranks that make different calls
//   never exchange data: both wait. A rank that has waited for some seconds therefore puts its log on the fault board and
//   reads those of the others. Two logs that hold different calls under one number prove a mistake. All else proves
//   nothing: a rank may be late, its text may be old, and it may be at another place of its program.
//   Ranks that wait for each other in a cycle (wait_cycle.h) are found by the same texts. Those are old when they are
//   read; but a cycle of which every rank has shown the same wait again since it was seen first, was there all the time
//   in between.
//   Calls before the last completed one were agreed on, so the log is short however many calls there have been.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
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
  // The calling thread uses the group from here on; add() says so too.
  void use(int64_t instance);
  // The call is through: the log need not compare it and those before again.
  void done(int64_t instance, int64_t number);

  // The calling thread is blocked in a call until rank `peer` makes it too; until the thread says otherwise (`peer` < 0).
  void block(int64_t instance, int64_t number, int peer);

  // The log as bytes, for difference() and cycle() of another rank. Each text has a number, one more than the text before it.
  std::string text();
  // The first call that this rank and rank `peer`, whose log is `text`, have made differently: "the ranks disagree:
  // rank 0 called ..., rank 1 called ...". A text that is cut off counts as empty.
  std::optional<std::string> difference(int peer, const std::string& text) const;
  // A cycle of ranks that wait for each other, this one among them, as the texts have it, and which look of each other rank
  // the texts are of. `shown(rank)`: the rank's last text.
  struct Cycle {
    std::string text;
    std::vector<int64_t> calls;  // instance and number, from this rank on
    std::map<int, int64_t> looks;
  };
  std::optional<Cycle> cycle(const std::function<std::string(int)>& shown) const;

 private:
  struct Call {
    int64_t number = 0;
    OpInfo info;
    Splits splits;
  };
  struct Blocked {
    int64_t instance = 0, number = 0;
    int peer = -1;
  };
  struct Sequence {
    int64_t added = 0;
    std::thread::id user;
    std::deque<Call> calls;
  };

  std::string wait_text() const;

  const int rank_;
  mutable std::mutex mutex_;
  std::map<int64_t, Sequence> sequences_;  // by instance
  std::map<std::thread::id, Blocked> blocked_;
  int64_t looks_ = 0;
};

}  // namespace tessera::comm

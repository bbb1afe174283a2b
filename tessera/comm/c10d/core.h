// The part of a c10d group that its pending works share: the process group, receive buffers, the state of failure, and
// the watcher that lets a blocked wait end when another rank reports a failure, has made another call or is
// no more.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/backends.h"
#include "tessera/comm/c10d/call_log.h"
#include "tessera/comm/c10d/fault_board.h"
#include "tessera/comm/op_info.h"
#include "tessera/comm/process_owner.h"

namespace tessera::comm {

constexpr auto kOthersEnd = std::chrono::seconds(2);  // what is on its way to the other ranks has arrived by then

// Runs a step of the end: ending goes on whatever it throws.
template <class F>
void attempt(const F& step) noexcept {
  try {
    step();
  } catch (...) {
    // Nobody takes the error here: a failure of the group is its next call's to report.
  }
}

std::shared_ptr<c10d::ProcessGroup> hold_group(const HoldProcessGroup& hold,
                                               c10::intrusive_ptr<c10d::ProcessGroup> group);

// One call of a group, as the group's log knows it.
struct C10dCall {
  OpInfo info;
  int64_t instance = 0, number = 0;
};

// One message from or to a peer; peer < 0: a native collective of the back end.
struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  int peer = -1;
  at::Tensor mark{};  // received behind a large message: one byte, not zero once the message is there
};

// Transfers that nobody waits for, and the memory they use.
struct LeftTransfers {
  std::vector<at::Tensor> memory;
  std::vector<Transfer> transfers;
  // The groups that the transfers run on, where their owner has gone first.
  std::shared_ptr<c10d::ProcessGroup> group{};
  c10::intrusive_ptr<c10d::Backend> backend{};
};

// Made by make_owned(): it has a thread. In a forked copy of the process all calls throw, but abort(), which does nothing.
class C10dCore {
 public:
  C10dCore(HoldProcessGroup hold, c10::intrusive_ptr<c10d::ProcessGroup> group);
  ~C10dCore();

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Counts this rank's Groups over the process group, from 1: each has tags and fault reports of its own. Ranks make
  // their groups in one order.
  int64_t instance() const { return instance_; }
  // The number of a further Group on this core.
  int64_t count_instance();
  c10d::ProcessGroup& group() { return *group_; }
  // How the process group is held, as are others made of it.
  const HoldProcessGroup& hold() const { return hold_; }
  // The part `name` of the group's store, where waits end when the group fails or a rank is lost.
  c10::intrusive_ptr<c10d::Store> watched_store(const std::string& name) const;
  // Every call is added before its messages are posted.
  CallLog& calls() { return calls_; }

  bool failed() { return !cause().empty(); }
  // Throws when the group has failed before, and in a forked copy.
  void check_alive(const OpInfo& info);
  // Waits for all transfers, and releases them. On a failure: settles the cause with the other ranks and throws.
  void finish(std::vector<Transfer>& transfers, const C10dCall& call, std::chrono::steady_clock::time_point launched);
  // Fails the group from this rank's side with `what` and throws: for errors while launching.
  [[noreturn]] void fail(const OpInfo& info, std::chrono::steady_clock::time_point launched, int peer,
                         const std::string& what);
  void abort(const std::string& reason);

  // A byte tensor of at least `bytes`, from the cache where possible; give it back when done. At most two are kept.
  at::Tensor take_buffer(int64_t bytes);
  void give_buffer(at::Tensor buffer);
  // Whether the marks of all peers are there. Nothing where a message has no mark: it is small, or a native collective.
  std::optional<bool> marks_have_come(const std::vector<Transfer>& transfers) const;
  // Keeps transfers until all have come; the core ends those that a back end can abort, see Note [Left collectives].
  void keep(LeftTransfers left);
  bool have_come(const LeftTransfers& left) const;

 private:
  void check_owner(const OpInfo& info) const;
  void watch();
  void end_left();
  std::optional<std::string> compare_calls();
  std::optional<std::string> look_for_cycle();
  std::optional<std::string> look_for_ended(std::chrono::steady_clock::time_point waiting_since);
  void interrupt();  // ends the current wait; mutex_ is held
  std::string cause();

  const ProcessOwner owner_;
  const HoldProcessGroup hold_;
  const std::shared_ptr<c10d::ProcessGroup> group_;
  const int rank_, size_;
  const int64_t instance_;
  FaultBoard board_;
  CallLog calls_;
  std::optional<CallLog::Cycle> cycle_;                            // the watcher's: the last one seen, as is ended_at_
  std::optional<std::chrono::steady_clock::time_point> ended_at_;  // when it saw that a peer's process had ended

  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::string cause_;                         // first failure; empty while all is well
  bool asked_ = false;                        // whether a failure has asked the other ranks who is still there
  std::vector<Transfer>* current_ = nullptr;  // what a wait blocks on
  std::chrono::steady_clock::time_point waiting_since_;
  std::vector<at::Tensor> buffers_;
  std::vector<LeftTransfers> left_;
  std::thread watcher_;
};

}  // namespace tessera::comm

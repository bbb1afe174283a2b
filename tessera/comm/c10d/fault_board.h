// FaultBoard: what ranks of a group in trouble announce through the group's store: the first cause of a failure, who is
// still there, which processes they are, and what they have called.
// All calls are local, bounded in time while the store answers, and never throw; a store that cannot be reached (its
// host may be the process that died) is part of the report.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm {

// Whether all of `keys` come within `limit`. Looks again and again: a wait of the store's own that times out is a warning
// in torch's log. Throws what the store throws.
bool come_within(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds limit);

// The text that rank `rank` sets `key` to. DistBackendError that names the rank when the store's timeout is over.
std::string announced_by(c10d::Store& store, const std::string& key, int rank);

// Returns on no rank before all ranks have come to it, on rank 0, whose process may host the store, last: a rank that ends
// takes with it what others are just reading or connecting to. Collective, once for a store.
void leave_together(c10d::Store& store, int rank, int size);

class FaultBoard {
 public:
  // `store` may be null: then nothing is reported and nothing is known of the others. `job`: where the same ranks have shown
  // their processes before; a rank that ended before it came to `store` is known from there.
  FaultBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string group,
             c10::intrusive_ptr<c10d::Store> job = nullptr);

  // Reports `cause` unless somebody has already; returns the cause that came first.
  std::string report(const std::string& cause);
  // The first cause, if any rank has reported one.
  std::optional<std::string> reported();
  // Shows `calls` to the other ranks, in place of what this rank showed before.
  void show_calls(const std::string& calls);
  // What rank `rank` has shown last; empty when nothing.
  std::string shown_calls(int rank);
  // Announces to the others, in all groups of the store, which process this rank is. Where another process has announced that it
  // is this rank, and has not been seen to end, that process stays; returns "processes 12 and 34 of one host".
  std::optional<std::string> show_process();
  // Whether rank `rank` has shown its process. Throws what the store throws.
  bool has_shown(int rank);
  // Waits until rank `rank` has shown its process, `limit` at most.
  void await_process(int rank, std::chrono::milliseconds limit);
  struct Process {
    int pid = 0;
    uint64_t start = 0;  // 0: another host's
    bool has_ended() const;
  };
  // The process that rank `rank` has shown. The answer is kept: for one thread.
  std::optional<Process> process_of(int rank);
  // The id of the process that rank `rank` was, where this host had it and it has ended.
  std::optional<int> ended_process(int rank);
  // Marks this rank as alive, waits up to `limit` for the same mark of the others, and describes ranks without one:
  // "no answer within 2.0 s from rank(s) 2 (dead, or busy outside of any collective)". Empty when all answered.
  std::string roll_call(std::chrono::milliseconds limit);

 private:
  std::string key(const std::string& what) const;

  c10::intrusive_ptr<c10d::Store> store_, job_;
  int rank_, size_;
  std::string group_;
  std::map<int, Process> processes_;  // by rank
};

}  // namespace tessera::comm

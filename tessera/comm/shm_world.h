// One rank's view of a group over shared memory and its siblings: channels, the first cause of failure, and the waits.
//
// Note [Who moves the data]
//   There is no thread behind the scenes. Launching a call writes as many of its records as the ring holds (2 MiB), and
//   every wait moves all calls in flight, of siblings too, as far as possible. So a rank that has launched does not hold
//   up the others with what fits, waits of two siblings may be in any order, and no core is burned: a wait spins for some
//   microseconds and then sleeps until another rank rings.
// Note [Lost ranks over shared memory]
//   A sleeping rank looks up every 0.1 s whether the processes it waits for still run (id and start time, so a reused id
//   is no life). What a dead rank has written stays readable: only a rank that is really missing is an error. The first
//   cause is kept in the segment, and all ranks are woken by it.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/shm_channel.h"
#include "tessera/comm/shm_segment.h"

namespace tessera::comm {

class ShmWorld {
 public:
  using Clock = std::chrono::steady_clock;

  // The segment has at least ShmLayout{size}.total() bytes, its control part has memory.
  ShmWorld(std::shared_ptr<ShmSegment> segment, int rank, int size, std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Ranks whose process cannot be seen from here; all must have made their world.
  std::vector<int> unseen() const;

  // This rank's next channel, with memory for its ring. Ranks add channels in one order.
  int add_channel();
  void leave(int channel);
  // Throws when the group has failed before. Moves what can be moved, does not wait.
  void launch(int channel, const ShmOpPtr& op);
  void wait(int channel, ShmOp& op, Clock::time_point launched);
  void abort(const std::string& reason);  // any thread

 private:
  struct Sleep;

  std::string cause() const;
  void fail(const std::string& text);
  void check_alive(const OpInfo& info, Clock::time_point since) const;
  bool progress();
  void sleep(int channel);
  std::string trouble(int channel, const OpInfo& info, Clock::time_point since);

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  ShmHeader& header_;
  ShmRank* const ranks_;
  const std::chrono::microseconds spin_;

  std::mutex mutex_;  // channels_ and what they move
  std::vector<std::unique_ptr<ShmChannel>> channels_;
};

}  // namespace tessera::comm

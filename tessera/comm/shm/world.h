// One rank's view of a group over shared memory and its siblings: channels, the first cause of failure, and the waits.
//
// Note [Who moves the data]
//   There is no thread behind the scenes. Launching a call writes as many of its records as the ring holds (2 MiB), and
//   every wait moves all calls in flight, of siblings too, as far as possible. So a rank that has launched does not hold
//   up the others with what fits, waits of two siblings may be in any order, and no core is burned: a wait spins for some
//   microseconds and then sleeps until another rank rings. Several threads of a rank may launch and wait: whoever gets
//   hold of the channels moves the data of all of them.
// Note [Lost ranks over shared memory]
//   A sleeping rank looks up every 0.1 s whether the processes it waits for still run (id and start time, so a reused id
//   is no life). What a dead rank has written stays readable: only a rank that is really missing is an error. The first
//   cause is kept in the segment, and all ranks are woken by it.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/process_owner.h"
#include "tessera/comm/shm/channel.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm {

// Any thread may make any call. In a forked copy of the process calls that wait or send throw, and others do nothing.
class ShmWorld {
 public:
  using Clock = std::chrono::steady_clock;

  // The segment has at least ShmLayout{size}.total() bytes, its control part has memory. `numbers[r]`: what rank r is called
  // in messages, ascending; none: r.
  ShmWorld(std::shared_ptr<ShmSegment> segment, int rank, int size, std::chrono::milliseconds timeout,
           std::vector<int> numbers = {});

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::shared_ptr<ShmSegment>& segment() const { return segment_; }
  // Longest wait for a rank during which nothing moves.
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_.load()); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout.count(); }
  // Ranks whose process cannot be seen from here; all must have made their world.
  std::vector<int> unseen() const;

  // This rank's next channel, with memory for its ring. Ranks add channels in one order.
  int add_channel();
  void leave(int channel);
  // Moves what `endpoint` has in flight with the channels from here on. Returns what stands for it in place of a channel.
  int attach(std::shared_ptr<ShmEndpoint> endpoint);
  // These throw when the group has failed before; they move what can be moved, and do not wait.
  void launch(int channel, const ShmOpPtr& op);
  // `add` gives the call to what is attached as `endpoint`.
  void launch(int endpoint, const ShmCall& call, const std::function<void()>& add);
  void poll(const ShmCall& call);

  struct Wait {
    Clock::time_point launched = Clock::now();         // for texts
    Clock::time_point since = Clock::now();            // when the wait began
    std::optional<std::chrono::milliseconds> limit{};  // limit of the wait, in place of timeout()
    std::function<bool()> until{};  // whether to return early, with the call in flight; asked after each wake()
  };
  // `channel`: that of the call, or what attach() returned.
  void wait(int channel, const ShmCall& call, const Wait& how);
  // Moves what can be moved until `end` at most; true when the call is done, or the group has failed.
  bool wait_until(const ShmCall& call, Clock::time_point end);
  void wake();
  void abort(const std::string& reason);
  // Fails with a cause that names a rank itself.
  void fail(const std::string& text);

 private:
  struct PriorityLock;
  struct Sleep;
  class ShownWait;
  struct Blocked;

  std::string cause() const;
  std::string join_numbers(std::vector<int> ranks) const;
  void check_owner(const OpInfo& info) const;
  void check_alive(const OpInfo& info, Clock::time_point since) const;
  template <class F>
  void begin(const OpInfo& info, const F& body);
  bool progress();
  bool try_progress();
  Clock::time_point last_moved(Clock::time_point since) const;
  bool shares_core();
  template <class F>
  bool sleep(const F& done);
  ShmEndpoint& endpoint(int channel);
  std::vector<int> missing(ShmEndpoint& endpoint, const ShmCall& call);
  std::optional<Blocked> blocked(int rank) const;
  std::vector<Blocked> holding_up(const Blocked& wait) const;
  std::string cycle() const;
  std::string trouble(int channel, const ShmCall& call, Clock::duration idle, std::chrono::milliseconds limit);

  const ProcessOwner owner_;
  const std::shared_ptr<ShmSegment> segment_;
  const int rank_, size_;
  const std::vector<int> numbers_;
  std::atomic<int64_t> timeout_;  // milliseconds
  ShmHeader& header_;
  ShmRank* const ranks_;

  std::atomic<int64_t> moved_ = 0;  // when anything last moved, on Clock
  std::atomic<int> launching_ = 0;  // threads that want the mutex for a moment
  std::mutex mutex_;                // what follows
  std::vector<std::unique_ptr<ShmChannel>> channels_;
  std::vector<std::thread::id> users_;                  // of the channels: who made the last call, or the channel
  std::vector<std::shared_ptr<ShmEndpoint>> attached_;  // as channels -1, -2, ...
};

}  // namespace tessera::comm

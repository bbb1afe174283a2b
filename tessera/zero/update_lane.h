// UpdateLane: what of an update runs on after step(), or after the backward, beside the next forward.
//
// Note [Updates that run on]
//   With Options::update_runs_on an update of a model on a device ends once what lives there is updated. Units whose states or
//   weights live elsewhere are left to a thread, which has copies of what may change meanwhile (numbers of steps,
//   hyper-parameters, the scale); counters, p.grad and the schedule go on at once. So the bits are those of an update that is
//   waited for.
//   - The thread has a stream of its own. A unit's update comes after what its streams were given before add(). The thread calls
//     no group, takes no lock of an engine's and runs no Python. It works on its units' buffers and on the engine's Lanes, which
//     nobody else uses meanwhile, and leaves Unit::order to who runs the model.
//   - The thread announces for each unit, with events, when the way back of its weights was launched. await() is for who uses a
//     unit: the host waits for the announcement, the current stream for the events.
//   - Weights that are whole on several ranks are gathered by the thread that runs the model, in the order that open() was given,
//     all up to the unit that it uses: modules must run in the same order on all ranks, as those of partitioned parameters must.
//   - settle() is for who reads or writes states. It is local, and gathers nothing.
//   - A failure, of a disk or of memory, is an error of the next call that waits, on one rank. Ranks agree in finish(), which
//     the next update calls at the latest; until then they go on, since the others would wait for a rank that stopped.
//
// Note [Updates that begin in the backward]
//   With Options::update_in_backward too, units come one by one while the backward goes on, the last ones of the forward first, and
//   the thread takes them as they are there. Autograd's thread runs none of this and waits for none of it, but for memory:
//   - The gradients of a unit that the host updates leave the device as in a usual step (Note [Gradients leave] in host_grads.h),
//     so its bucket is free when the copy is over, however far behind the host is.
//   - A unit that the device updates keeps its bucket until the update was launched. The thread takes such units first, and the
//     backward waits while there are more than kHeld.
//   - Of the other units the thread takes the one that the next forward uses first, so that what is left at the end is used late.
//   Ranks exchange whether the last update failed with what they compare before the first unit of the next backward is
//   updated. A backward that threw leaves the lane open: nothing waits for units that have not come, and the next backward, or
//   who drops the gradients, ends that update. Nothing of it is gathered, because not all ranks may have come as far.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/optim/optimizer.h"
#include "tessera/zero/rank_guard.h"
#include "tessera/zero/segments.h"

namespace tessera::zero {

class Units;
struct Lanes;

// All but the part of the lane's thread is for the thread that runs the model.
class UpdateLane {
 public:
  static constexpr int kHeld = 2;
  struct Work {
    Unit* unit;
    shard::Buffer grads;  // of its owned range
    std::vector<Segment> segments;
    double scale;  // of the gradients
    // Ends the gradients' use, as ArrivedSum::release; not called by the lane's thread. Without it the lane lets go of them.
    std::function<void(const std::shared_ptr<c10::Event>&)> release{};
    std::shared_ptr<c10::Event> start{};  // add() makes this event
  };
  using Gather = std::function<comm::Pending(Unit&)>;

  explicit UpdateLane(Units& units) : units_(units) {}
  ~UpdateLane() { stop(); }
  UpdateLane(const UpdateLane&) = delete;
  UpdateLane& operator=(const UpdateLane&) = delete;

  // Whether the options ask for a lane and some states or weights may live elsewhere than on the device, which is not the CPU.
  bool on() const;
  // Whether updates of `unit` run on.
  bool takes(const Unit& unit) const;

  // Begins an update of some of `units`, in the order in which the next forward uses them, once finish() has ended the last one,
  // or agreed() was called. `gather` starts to gather a unit's weights. `disks` has what failed in the update so far.
  void open(const std::vector<Unit*>& units, Lanes& lanes, Gather gather, RankGuard disks);
  bool is_open() const { return open_; }
  // Leaves the update of a unit to the thread. `present`: by parameter, whether it is updated. Waits while kHeld units that are
  // to be released have not been. Nothing has changed where this throws.
  void add(Work work, const std::vector<bool>& present);
  // Says that no more units come. `disks` has what failed beside the thread.
  void close(RankGuard disks = RankGuard(true));
  // Ends an open update, with the units that were added; gathers nothing of them, and forgets what failed. Local.
  void abandon();

  // The current stream may read the weights of `unit` afterwards. Collective where they are gathered: Note [Updates that run on].
  void await(const Unit& unit);
  // Whether await() would neither wait for the thread nor gather.
  bool is_there(const Unit& unit) const;
  // Whether nothing of the unit runs on, or await() was called since.
  bool is_awaited(const Unit& unit) const;
  // Waits for all states of this rank: those after the update, or while it is open after that of the units so far, for what the
  // current stream is given from here on. On one rank IoError or OutOfMemoryError where the update failed. Local.
  void settle();
  // Gathers the weights that await() has not gathered. Collective.
  void gather_rest();
  // Settles and gathers the rest. Where the update failed on some rank: IoError or OutOfMemoryError, on all ranks. Collective;
  // nothing happens where no update has run on since the last call.
  void finish();
  // After settle(): whether an update of this rank's failed, and ranks have not agreed on it.
  bool has_failed() const;
  // Says that no rank's update failed.
  void agreed() { agreed_ = true; }
  // Ends the thread, with the update. Local. Weights that are not gathered stay so: true where there are such.
  bool stop() noexcept;

 private:
  // A unit whose update runs on.
  struct Coming {
    Unit* unit = nullptr;
    bool gathers = false, added = false, awaited = false;
    // The lane's thread writes these, under mutex_.
    bool there = false;
    std::vector<std::shared_ptr<c10::Event>> events;  // of the unit's weights
  };
  struct Job {
    std::vector<optim::GroupOptions> groups;
    Lanes* lanes;
    int threads;
  };

  void arrive(Coming& coming);
  void gather_until(size_t end);
  void agree();
  void forget();
  void collect();
  void wait_for(const std::function<bool()>& what);
  bool rests() const { return job_ == nullptr || (waiting_.empty() && rests_); }

  void loop();
  void run(const Job& job);
  Work* next(const std::function<void()>& end_the_last);
  void end_first(std::vector<std::shared_ptr<c10::Event>> events);

  Units& units_;
  Gather gather_;
  std::vector<bool> present_;
  std::vector<Coming> coming_;  // in the order of the next forward; until all of it is settled and gathered
  std::unordered_map<const Unit*, size_t> numbers_;  // numbers of units in coming_
  size_t gathered_ = 0;                              // of coming_
  bool runs_ = false;                                // begun and not settled
  bool agreed_ = true;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Job> job_;   // until the thread is through
  std::vector<Work> waiting_;  // units for the thread
  bool open_ = false, stops_ = false, failed_ = false;
  bool rests_ = false;  // the thread has done all that came
  int held_ = 0;        // works to be released
  std::vector<std::pair<decltype(Work::release), std::shared_ptr<c10::Event>>> used_;
  RankGuard beside_{true};      // what close() was given
  RankGuard disks_{true};       // what failed on the thread, which has it while there is a job
  std::deque<Work> under_way_;  // units that the thread works on
  std::exception_ptr error_;    // the thread's, as disks_
  std::thread thread_;
};

}  // namespace tessera::zero

// UpdateLane: what of an update runs on after step(), beside the next forward.
//
// Note [Updates that run on]
//   With Options::update_runs_on an update of a device's model ends with what lives there. Units whose states or weights live
//   elsewhere are left to a thread, one after the other in the order in which the next forward uses them. What it needs of the
//   step that may change meanwhile (numbers of steps, hyper-parameters, the scale) it has copies of; counters, p.grad and the
//   schedule go on at once. So the bits are those of an update that is waited for.
//   - The thread has a stream of its own, which comes after what step() was given. It calls no group, takes no lock of an
//     engine's and runs no Python. It works on its units' buffers and on the engine's Lanes, which nobody else uses meanwhile.
//   - Of each unit it tells when the way back of its weights was launched, with events. await() is for who uses a unit: the
//     host waits until that was told, the current stream for the events.
//   - Weights that are whole on several ranks are gathered by the thread that runs the model, in the order of the update, all
//     up to the unit that it uses: modules must run in the same order on all ranks, as those of partitioned parameters must.
//   - settle() is for who reads or writes states. It is this rank's alone: it gathers nothing.
//   - What fails, a disk or memory, is an error of the next call that waits, on one rank. Several ranks agree in finish(), which
//     the next update is at the latest; until then they go on, since one that stopped would be waited for.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/optim/optimizer.h"
#include "tessera/zero/rank_guard.h"
#include "tessera/zero/segments.h"

namespace tessera::zero {

class Units;
struct Lanes;

// All but its thread's part is for the thread that runs the model.
class UpdateLane {
 public:
  struct Work {
    Unit* unit;
    shard::Buffer grads;  // of its owned range
    std::vector<Segment> segments;
  };
  using Gather = std::function<comm::Pending(Unit&)>;

  explicit UpdateLane(Units& units) : units_(units) {}
  ~UpdateLane() { stop(); }
  UpdateLane(const UpdateLane&) = delete;
  UpdateLane& operator=(const UpdateLane&) = delete;

  // The options ask for it and some states or weights may live elsewhere than on the device, which is not the CPU.
  bool on() const;

  // Leaves `work`, in this order, to the thread, once finish() has ended what ran on before. Gradients are multiplied by `scale`.
  // `present`: by parameter, which are updated. `gather` starts to gather a unit's weights. `disks` has what failed in the update so
  // far.
  void begin(std::vector<Work> work, const std::vector<bool>& present, double scale, Lanes& lanes, Gather gather,
             RankGuard disks);

  // The current stream may read the weights of `unit`. Collective where they are gathered: Note [Updates that run on].
  void await(const Unit& unit);
  // The host would not wait for the thread, nor gather.
  bool is_there(const Unit& unit) const;
  // Nothing of it runs on, or await() was called since.
  bool is_awaited(const Unit& unit) const;
  // All states of this rank are those after the update, for what the current stream is given from here on. On one rank IoError
  // or OutOfMemoryError where the update failed. Local.
  void settle();
  // Gathers what await() has not. Collective.
  void gather_rest();
  // Both. Where the update failed on some rank: IoError or OutOfMemoryError, on all ranks. Collective; nothing happens where
  // no update has run on since the last call.
  void finish();
  // The thread comes to its end, with the update. Local. What is not gathered stays so: true where there is such.
  bool stop() noexcept;

 private:
  // A unit whose update has run on.
  struct Coming {
    Unit* unit = nullptr;
    bool gathers = false;
    bool awaited = false;
    // The thread's, under mutex_.
    bool there = false;
    std::vector<std::shared_ptr<c10::Event>> events;  // of its weights
  };
  struct Job {
    std::vector<Work> work;
    std::vector<optim::GroupOptions> groups;
    double scale;
    Lanes* lanes;
    std::shared_ptr<c10::Event> start;
    int threads;
  };

  void arrive(Coming& coming);
  void gather_until(size_t end);
  void agree();
  void loop();
  void run(Job& job);
  void tell(size_t number, std::vector<std::shared_ptr<c10::Event>> events);
  void wait_for(const std::function<bool()>& what);

  Units& units_;
  Gather gather_;
  std::vector<bool> present_;
  std::vector<Coming> coming_;  // in the order of the update; until all of it is settled and gathered
  std::unordered_map<const Unit*, size_t> numbers_;
  size_t gathered_ = 0;  // of coming_
  bool runs_ = false;    // begun and not settled
  bool agreed_ = true;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Job> job_;  // until the thread is through
  bool stops_ = false, failed_ = false;
  RankGuard disks_{true};     // the thread's, while it has a job
  std::exception_ptr error_;  // as this
  std::thread thread_;
};

}  // namespace tessera::zero

// UpdateInBackward: updates units while the backward goes on.
//
// Note [Update in the backward]
//   With Options::update_in_backward a unit is updated as soon as its gradients are reduced, and they are dropped: there is
//   never more of them than the buckets of the units on their way. Nothing in the backward reads a parameter any more once
//   all its gradients are there; what does so all the same (a weight used detached as well) gets torch's own error, as after
//   an in-place update. Other ranks' weights are gathered at the end of the backward, so that a forward before step() sees
//   one model. step() counts, and reports the norm.
//   What ranks must have alike is compared before the first unit is updated: a number that travels with the first gradient,
//   and is waited for with the first sum, by when all ranks have sent it. Where it differs, or a rank cannot step, the sums
//   still come, so that all ranks make the same calls, and go unused; the backward ends with an error, on all of them.
//   Where nothing is clipped the host waits for nothing else: the squares of a unit stay on its device until somebody asks
//   for the norm; with several ranks that is step(). A rank that has gradients for all of a unit need not know of the
//   others' to update it.
//   With Options::update_runs_on units that live elsewhere are left to UpdateLane: Note [Updates that begin in the backward].
//   Bits are those of the usual step. What must be known before the first unit is updated excludes it: see excluded().
//
// Note [Clipping by the step before]
//   The coefficient of a step's gradients is that which exact clipping gives the norm of the step before, min(1, limit / (norm +
//   1e-6)), and 1 where there is none: known before the backward, so that nothing waits for a norm. One rank sends its norm to
//   the host when step() counts, and reads it at the first gradient of the next backward. A checkpoint has it, so that a run
//   goes on with the same bits. Where the norm was not finite the model is lost, as without clipping: the backward refuses.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "tessera/zero/updater.h"

namespace tessera::zero {

class UpdateInBackward final : private SumSink {
 public:
  // What a backward updates by, for ranks to compare.
  struct Terms {
    double announced = 0;  // a finite number
    bool refuses = false;  // this rank cannot step
    double scale = 1;      // of its gradients, where they are not clipped by unit
  };

  // Takes the driver's sums where the options say so, and else does nothing.
  UpdateInBackward(Units& units, BackwardDriver& driver, Updater& updater);
  ~UpdateInBackward();
  UpdateInBackward(const UpdateInBackward&) = delete;
  UpdateInBackward& operator=(const UpdateInBackward&) = delete;

  // What of these options and ranks needs all gradients first, or separate memory; empty: nothing.
  static std::vector<std::string> excluded(const Options& options, optim::Rule rule, const comm::Mesh& mesh);

  bool on() const { return units_.options().update_in_backward; }
  // `terms`: asked once a backward. `refuse`: throws where the terms of ranks differ, or this rank refuses. Collective over
  // the ranks that `refuse` is given.
  void compare_by(std::function<Terms()> terms, std::function<void(const Ranks&)> refuse);
  // The optimizer step is over: forgets what it has updated.
  void reset();
  // Takes note that there are more parameters. Local.
  void params_changed() { present_.resize(units_.count()); }
  // By parameter: whether it was updated since reset().
  const std::vector<bool>& present() const { return present_; }

 private:
  // A sum whose norm, for the clipping, is on its way.
  struct Waiting {
    ArrivedSum sum;
    at::Tensor squares;
    comm::Pending pending;
  };

  bool uses_up() const override { return true; }
  void backward_begun() override;
  void prepare() override;
  void compare() override;
  bool refuses() override;
  void refuse() override;
  void take(ArrivedSum sum) override;
  void drop() override;
  void launch_end() override;
  void finish_end() override;
  at::Tensor squares_of(ArrivedSum& sum);
  void update(ArrivedSum sum, double scale);
  std::shared_ptr<c10::Event> update_from(ArrivedSum& sum, double scale);
  void leave(ArrivedSum& sum, double scale);
  void update_oldest();
  void forget(at::Tensor& memory, comm::Pending& pending) const noexcept;
  void forget_waiting();

  Units& units_;
  BackwardDriver& driver_;
  Updater& updater_;
  std::function<Terms()> terms_;
  std::function<void(const Ranks&)> refuse_;
  Ranks ranks_;        // of its own, for what is compared and norms of units
  at::Tensor bounds_;  // of what ranks say, on their way
  comm::Pending comparison_;
  bool compared_ = false, refuses_ = false;
  double scale_ = 1;  // Terms::scale
  std::deque<Waiting> waiting_;
  std::vector<bool> present_;
  RankGuard disks_;
  GradCopies copies_;  // of gradients that leave the device
};

}  // namespace tessera::zero

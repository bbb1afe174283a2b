// SumDestination: where the sum of a unit's gradients goes once it is over all ranks of the unit's group. There are three: the
// gradients that the unit keeps, host memory, and whoever takes sums as they arrive.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/zero/contributions.h"

namespace tessera::zero {

// The sum of a unit's gradients over ranks, on its way to who uses it up.
struct ArrivedSum {
  Unit* unit;
  at::Tensor values;          // of the owned range; undefined where they lie in pieces
  std::vector<bool> present;  // by parameter of the unit: some rank has a gradient
  // Ends the use of the values, to be called once: nothing uses them any more, but what comes before the event.
  std::function<void(const std::shared_ptr<c10::Event>&)> release;
};

// Who takes sums as they arrive, where no buffer keeps them (Options::update_in_backward). Called within a backward.
class SumSink {
 public:
  virtual ~SumSink() = default;
  virtual void backward_begun() = 0;
  // Says that sums will come.
  virtual void prepare() = 0;
  // Compares ranks before a backward's first sum is launched, at its first gradient or its end. Once a backward; collective.
  virtual void compare() = 0;
  virtual void take(ArrivedSum sum) = 0;
  // The gradients are dropped: forgets what was taken and not used yet, of a backward that threw.
  virtual void drop() = 0;
  // The last sums have come. Launches collectives, and waits for them.
  virtual void launch_end() = 0;
  virtual void finish_end() = 0;
  // Whether all ranks refuse this backward, whose sums were dropped. The same on all ranks once a sum has come.
  virtual bool refuses() = 0;
  // Throws why. Collective.
  virtual void refuse() = 0;
};

class SumDestination {
 public:
  virtual ~SumDestination() = default;
  // Makes memory that the reduction needs. Where there is none, nothing has changed.
  virtual void prepare(Reduction&) {}
  // Launches the sum of `source`, the contributions as they travel, into work.sum, which is there in the owned range (stage 0: in
  // all of `source`).
  virtual void launch(Reduction& work, const at::Tensor& source, comm::ReduceOp op, const std::string& label);
  // The sum is on its way.
  virtual void launched(Reduction&) {}
  // Takes work.sum, which is there. Buckets that are kept are no longer `work`'s.
  virtual void take(Reduction& work) = 0;
  // Takes the contributions of one rank, which are the sum: those in `bucket`, or in pieces.
  virtual void take_alone(Unit&, const at::Tensor& /*bucket*/) {}
  // Makes work.sum what was taken so far, or begins to bring it there, to be summed over replicas; put_back() ends that.
  virtual void lend(Reduction& work);
  virtual void put_back(Reduction&) {}
};

// The gradients of the owned range: a slice, or all of them in stage 0.
class KeptSum final : public SumDestination {
 public:
  explicit KeptSum(Contributions& contributions) : contributions_(contributions) {}
  void prepare(Reduction& work) override;
  void launch(Reduction& work, const at::Tensor& source, comm::ReduceOp op, const std::string& label) override;
  void take(Reduction& work) override;

 private:
  Contributions& contributions_;
};

// Note [Gradients leave] in host_grads.h
class HostSum final : public SumDestination {
 public:
  HostSum(Contributions& contributions, GradBuckets& buckets) : contributions_(contributions), buckets_(buckets) {}
  void launched(Reduction& work) override;
  void take(Reduction& work) override;
  void take_alone(Unit& unit, const at::Tensor& bucket) override;
  void lend(Reduction& work) override;
  void put_back(Reduction& work) override { leave(*work.unit, work.sum); }

 private:
  // Begins to bring the sum so far back, into work.before.
  void bring_back(Reduction& work);
  // Copies a sum to the host, from a bucket that bring_back() gave.
  void leave(Unit& unit, const at::Tensor& sum) { leave(unit, sum, buckets_.returned, sum); }
  void leave(Unit& unit, const at::Tensor& sum, BucketPool& pool, const at::Tensor& bucket);

  Contributions& contributions_;
  GradBuckets& buckets_;
};

// Passes sums to a sink, with who has a gradient.
class SunkSum final : public SumDestination {
 public:
  SunkSum(SumSink& sink, GradBuckets& buckets) : sink_(sink), buckets_(buckets) {}
  void prepare(Reduction& work) override;
  void launch(Reduction& work, const at::Tensor& source, comm::ReduceOp op, const std::string& label) override;
  void take(Reduction& work) override;
  void take_alone(Unit& unit, const at::Tensor& bucket) override;

 private:
  using Release = decltype(ArrivedSum::release);
  void hand_over(Unit& unit, const at::Tensor& sum, const at::Tensor& present, Release release);

  SumSink& sink_;
  GradBuckets& buckets_;
};

}  // namespace tessera::zero

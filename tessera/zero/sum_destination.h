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

// Who uses sums up as they arrive, where no buffer keeps them (Options::update_in_backward). Called within a backward. This class
// itself is nobody: sums are kept for the step.
class SumSink {
 public:
  virtual ~SumSink() = default;
  virtual bool uses_up() const { return false; }
  virtual void backward_begun() {}
  // Says that sums will come.
  virtual void prepare() {}
  // Compares ranks before a backward's first sum is launched, at its first gradient or its end. Once a backward; collective.
  virtual void compare() {}
  virtual void take(ArrivedSum /*sum*/) {}
  // The gradients are dropped: forgets what was taken and not used yet, of a backward that threw.
  virtual void drop() {}
  // The last sums have come. Launches collectives, and waits for them.
  virtual void launch_end() {}
  virtual void finish_end() {}
  // Whether all ranks refuse this backward, whose sums were dropped. The same on all ranks once a sum has come.
  virtual bool refuses() { return false; }
  // Throws why. Collective.
  virtual void refuse() {}
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

  // Whether it is worth launching the unit while the backward goes on: something is on its way then.
  virtual bool goes_on(const Unit& unit) const { return !one_rank(unit); }
  // Whether buckets of the unit are in use after the backward.
  virtual bool keeps_buckets(const Unit&) const { return false; }
  // State error where `param` gets a gradient that can no longer be added.
  virtual void check_open(const Unit&, const Param& /*param*/) const {}
  // Makes `memory`, where contributions of one rank go on, the sum so far, which lies elsewhere.
  virtual void bring_to(Unit&, const at::Tensor& /*memory*/) {}
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
  bool goes_on(const Unit&) const override { return true; }
  bool keeps_buckets(const Unit&) const override { return true; }
  void bring_to(Unit& unit, const at::Tensor& memory) override;

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
  bool goes_on(const Unit&) const override { return true; }
  bool keeps_buckets(const Unit& unit) const override { return unit.host_grads() != nullptr; }
  void check_open(const Unit& unit, const Param& param) const override;
  void drop() { sink_.drop(); }

 private:
  using Release = decltype(ArrivedSum::release);
  void hand_over(Unit& unit, const at::Tensor& sum, const at::Tensor& present, Release release);

  SumSink& sink_;
  GradBuckets& buckets_;
};

}  // namespace tessera::zero

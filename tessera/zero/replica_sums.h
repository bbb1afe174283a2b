// ReplicaSums: what each replica has summed becomes the sum over all of them, at the boundary.
//
// Note [Hybrid sharding]
//   Along dp_shard a unit is reduced like in any other engine, into slices that add up over micro-batches. Along
//   dp_replicate slices stay partial until the boundary and are reduced once, in place: 1/dp_shard of the bytes, once per
//   optimizer step. Nothing of it happens inside a backward, where ranks of different replicas need not be at the same
//   place.
#pragma once

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "tessera/base/phases.h"
#include "tessera/zero/sum_destination.h"

namespace tessera::zero {

class ReplicaSums {
 public:
  ReplicaSums(const Ranks& ranks, const Averaging& averaging, Patience& patience, GradBuckets& buckets,
              DestinationOf destination_of, Phases& phases)
      : ranks_(ranks),
        averaging_(averaging),
        patience_(patience),
        buckets_(buckets),
        destination_of_(std::move(destination_of)),
        phases_(phases) {}

  // Whether owned gradients are the sum over all replicas: the same on all ranks.
  bool agree() const { return agree_ || ranks_.replicate->size() == 1; }
  void set_agree(bool agree) { agree_ = agree; }
  // Collective.
  void launch(const std::vector<Unit*>& units);
  void finish();
  // More gradients come after launch(): the sums that are there must count once in the next one.
  void reopen(const std::vector<Unit*>& units);
  // A gradient of `unit` that replicas have apart becomes their sum or mean. Collective.
  void reduce_one(const Unit& unit, const at::Tensor& grad, comm::Label label) const;
  // Reductions on their way, for who lets go of them.
  std::deque<Reduction>& in_flight() { return in_flight_; }

 private:
  void finish_oldest();

  const Ranks& ranks_;
  const Averaging& averaging_;
  Patience& patience_;
  GradBuckets& buckets_;
  const DestinationOf destination_of_;
  Phases& phases_;
  bool agree_ = false;
  std::deque<Reduction> in_flight_;
};

}  // namespace tessera::zero

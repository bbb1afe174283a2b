// Reducer: local gradients into flat buffers, flat buffers into the sum over ranks.
//
// Note [Fixed order]
//   Collectives are launched in unit order (last unit of the forward first, root last), never in the order in which
//   gradients become ready, and every flush launches every unit: parameters without a gradient count as zero. So ranks
//   whose graphs differ (unused parameters, experts) make the same calls in the same order and cannot deadlock.
//   With partitioned parameters all ranks must also launch at the same place between the gathers: a rank that waits for a
//   free bucket in a launch takes part in no gather meanwhile. That place is the end of the backward of a unit's modules,
//   which is the same on all ranks. The moment when its parameters have their gradients is not: experts and unused
//   parameters make it differ. A unit of which no such end is known waits for the flush.
//
// Note [Waits]
//   How far a rank gets before it launches a unit depends on its own graph (unused parameters). A hook that waited for
//   another rank's launch could wait for a rank that waits for this one, in a collective of the user's. So:
//   - A launch waits for a bucket to come back for `patience_` at most, then takes a new one. The patience is halved by a
//     wait in vain and grows a little by one that was not: a rank that was late once must not cost memory for good.
//   - Gradients for a unit on its way go into another bucket.
//   - All other waits stand at the end of the backward, after all engines have launched (Note [Ends] in hooks.h), and in
//     the step.
//   - What only one rank knows of, as a nested backward, never decides whether there is a collective.
//
// Note [Averaging]
//   There are two factors. 1/gradient_accumulation_steps is in every local contribution, so that a gradient before its
//   reduction (no_sync, stage 0 before the boundary) is PyTorch's. Options::gradient_factor is that of the sum over ranks,
//   the same for all units, whatever groups they have. The reduction applies it to the fp32 sum, before its one rounding,
//   where it is one over the size of the unit's group (mean) or 1 (sum). Elsewhere (a unit that fewer ranks share) it takes
//   the mean, and what is left of the factor multiplies that.
//
// Note [Communication dtype]
//   Contributions may travel in another dtype than they accumulate in (torch_autocast, communication_data_type): cast
//   once into a bucket, summed in fp32, rounded once, cast back into or added to the flat gradient. Ranks' own
//   accumulation, norms and updates do not change.
//
// Note [Gradients on demand]
//   A unit has memory for gradients from its first contribution of a step until the update has read them: at the end of a
//   forward there is none, after the update of a unit none of that unit. With several ranks contributions lie in buckets,
//   whole, or where they are reduced at the boundary only (stage 1) in memory of the unit's; its first reduction makes the
//   memory of the slice that this rank owns, and with it the whole goes. Buckets are kept for other units of the same
//   backward, no longer.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "tessera/base/phases.h"
#include "tessera/zero/contributions.h"
#include "tessera/zero/ranks.h"
#include "tessera/zero/replica_sums.h"
#include "tessera/zero/sum_destination.h"

namespace tessera::zero {

class Reducer {
 public:
  // `ranks`: of the whole engine; units may have groups of their own. `units` in launch order. Both must outlive the reducer
  // and not move.
  Reducer(const Ranks& ranks, std::vector<Unit*> units, const Options& options, Phases& phases);

  // From here on `sink` takes the sums. It must outlive the reducer.
  void send_sums_to(SumSink& sink);

  // Adds scale * grad (dense, shape of the parameter) to the parameter's slot. `ours`: nobody else has it or its memory.
  void accumulate(Unit& unit, const Param& param, const at::Tensor& grad, double scale, bool ours = false);
  // This rank's contribution to `param` is `values` (1-D), as accumulate() had left it.
  void put(Unit& unit, const Param& param, const at::Tensor& values) { contributions_.put(unit, param, values); }
  // The sum over ranks is the mean of what they added, times this factor.
  double contributions(const Unit& unit) const { return averaging_.contributions(unit); }
  // Forgets this rank's contribution to `param` since the last step (the user dropped p.grad).
  void clear(Unit& unit, const Param& param) { contributions_.clear(unit, param); }

  // Begins a new outermost backward, in which no parameter has fired yet.
  void begin_backward();
  // `param` fired; launches every unit that is complete and whose turn it is, when `launch` allows.
  void fired(Unit& unit, const Param& param, bool launch);
  // All module calls that used `unit` are through; launches as fired() does.
  void over(Unit& unit, bool launch);
  // The end of a backward, in rounds (Note [Ends] in hooks.h); collective. The first two launch and wait only for what
  // all ranks have launched in the round before. `all_visible`: the user may look at the sums, so ranks agree which units
  // got gradients after their launch, and those are reduced once more.
  void launch_rest(bool all_visible);
  void launch_late();
  // Waits for the sums of what had come by the units' launches, within a replica.
  void finish();
  // A unit of this rank got gradients after its launch: from a nested backward, or a use outside of the modules that own
  // the parameter. The unit's next reduction takes them in.
  bool has_late() const;
  // Reduces late gradients now. Collective; to be called on all ranks when any rank has_late().
  void reduce_late();
  // Hybrid sharding: what finish() left is the sum within a replica; these make it the sum over all replicas. Collective.
  void launch_replicas() { replicas_.launch(units_); }
  void finish_replicas() { replicas_.finish(); }
  // A gradient of `unit` that replicas have apart becomes their sum or mean. Collective.
  void reduce_replicas_of(const Unit& unit, const at::Tensor& grad, comm::Label label) const {
    replicas_.reduce_one(unit, grad, label);
  }
  // Whether owned gradients are the sum over all replicas: the same on all ranks.
  bool replicas_agree() const { return replicas_.agree(); }
  void set_replicas_agree(bool agree) { replicas_.set_agree(agree); }
  // Takes over more units, in launch order: `joined` among them, whose gradients came past their launch and are reduced now,
  // unless the others are to be reduced yet (`with_others`). To be called between backwards; collective, all ranks with the same.
  void join(std::vector<Unit*> units, const std::vector<Unit*>& joined, bool with_others);
  // Some units are launched, and their backward has not come to its end, as after one that threw.
  bool is_open() const { return next_ > 0; }
  // Waits for collectives in flight (after a backward that threw).
  void drain();
  // Drops collectives in flight without throwing; only destroy may follow.
  void abandon();

  void free_buckets() { buckets_.free(); }
  // Bytes of the pools' buffers, in use and kept; the most they were.
  int64_t pool_bytes() const { return buckets_.bytes(); }
  int64_t peak_pool_bytes() const { return buckets_.peak_bytes(); }
  // Forgets all gradients: every unit is Empty, and no memory of theirs is held.
  void reset();
  // Forgets the gradients of one unit, of which no reduction is on its way.
  void forget(Unit& unit);

 private:
  SumDestination& destination_of(const Unit& unit);
  void see_what_goes_on();
  void make_room();
  void launch(Unit& unit);
  void launch_complete();
  void launch_alone(Unit& unit);
  void finish_oldest();
  void give_back(Reduction& work);
  void launch_agreement();

  const Ranks& ranks_;
  Phases& phases_;
  std::vector<Unit*> units_;
  const Averaging averaging_;
  const bool overlap_;  // units may be launched while the backward goes on
  bool any_goes_on_ = false;
  bool dropping_ = false;  // what arrives is dropped
  size_t next_ = 0;        // units_[next_] is the next to launch
  comm::Pending agreement_;
  at::Tensor late_;  // by unit; defined while ranks agree on it
  Patience patience_;
  GradBuckets buckets_;
  Contributions contributions_;
  KeptSum kept_;
  HostSum host_;
  std::unique_ptr<SunkSum> sunk_;  // with a sink: where sums of all units go
  std::deque<Reduction> in_flight_;
  ReplicaSums replicas_;
};

}  // namespace tessera::zero

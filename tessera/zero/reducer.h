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
// Note [Hybrid sharding]
//   Along dp_shard a unit is reduced like in any other engine, into slices that add up over micro-batches. Along
//   dp_replicate slices stay partial until the boundary and are reduced once, in place: 1/dp_shard of the bytes, once per
//   optimizer step. Nothing of it happens inside a backward, where ranks of different replicas need not be at the same
//   place.
//
// Note [Gradients on demand]
//   A unit has memory for gradients from its first contribution of a step until the update has read them: at the end of a
//   forward there is none, after the update of a unit none of that unit. With several ranks contributions lie in buckets,
//   whole, or where they are reduced at the boundary only (stage 1) in memory of the unit's; its first reduction makes the
//   memory of the slice that this rank owns, and with it the whole goes. Buckets are kept for other units of the same
//   backward, no longer.
//
// Note [Gradients in pieces]
//   On one rank nothing needs gradients in a row. Each parameter that is not small has a tensor of its own: the one that
//   autograd made, where nobody else has it and it lies as we want it, else a copy. Small ones that lie side by side share
//   one, into which they are copied. Norm and update take lists of them; what is missing is zero.
//
// Note [Gradients live once]
//   On several ranks the hook copies (first micro-batch) or adds (later ones) p.grad into the flat gradient, scaled and converted in that
//   one pass, and drops p.grad. Nothing is zeroed between steps: `filled` says which slots are valid, and slots without
//   a contribution are zeroed when their unit is reduced. Stage 0 gives p.grad back as a view of the flat gradient.
//
// Note [Accumulation in 16 bits]
//   What is added to a 16-bit gradient is rounded to nearest, as torch does, or stochastically where the policy says so:
//   then the mean of many small contributions is kept, where nearest rounding drops those below 0.4% of the sum. The random bits of a local
//   contribution depend on the rank too (ranks err independently), those of a sum over ranks do not: they are the same in
//   any world.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <vector>

#include "tessera/base/phases.h"
#include "tessera/shard/dtype.h"
#include "tessera/zero/bucket_pool.h"
#include "tessera/zero/ranks.h"
#include "tessera/zero/unit.h"

namespace tessera::zero {

// The sum of a unit's gradients over ranks, on its way to who uses it up.
struct ArrivedSum {
  Unit* unit;
  at::Tensor values;          // of the owned range; undefined where they lie in pieces
  std::vector<bool> present;  // by parameter of the unit: some rank has a gradient
  // Ends their use, to be called once: nothing uses them any more, but for what comes before the event.
  std::function<void(const std::shared_ptr<c10::Event>&)> release;
};

// Who takes sums as they arrive, where no buffer keeps them (Options::update_in_backward). Called within a backward.
class SumSink {
 public:
  virtual ~SumSink() = default;
  virtual void backward_begun() = 0;
  // Sums will come.
  virtual void prepare() = 0;
  // The first gradient of a backward is there, or its end: before its first sum is launched. Once a backward; collective.
  virtual void compare() = 0;
  virtual void take(ArrivedSum sum) = 0;
  // The gradients are dropped: what was taken and not used yet, of a backward that threw, is forgotten.
  virtual void drop() = 0;
  // The last sums have come. Launches collectives, and waits for them.
  virtual void launch_end() = 0;
  virtual void finish_end() = 0;
  // All ranks refuse this backward: what came was dropped. The same on all of them, once a sum has come.
  virtual bool refuses() = 0;
  // Says why. Collective; throws.
  virtual void refuse() = 0;
};

class Reducer {
 public:
  // `ranks`: of the whole engine; units may have groups of their own. `units` in launch order. Both must outlive the reducer
  // and not move.
  Reducer(const Ranks& ranks, std::vector<Unit*> units, const Options& options, Phases& phases);

  // From here on sums go there. `sink` must outlive the reducer.
  void send_sums_to(SumSink* sink) { sink_ = sink; }

  // Adds scale * grad (dense, shape of the parameter) to the parameter's slot. `ours`: nobody else has it or its memory.
  void accumulate(Unit& unit, Param& param, const at::Tensor& grad, double scale, bool ours = false);
  // This rank's contribution to `param` is `values` (1-D), as accumulate() had left it.
  void put(Unit& unit, Param& param, const at::Tensor& values);
  // The sum over ranks is the mean of what they added, times this.
  double contributions(const Unit& unit) const { return one_rank(unit) ? 1.0 : factor_ * unit.ranks.size(); }
  // Forgets this rank's contribution to `param` since the last step (the user dropped p.grad).
  void clear(Unit& unit, Param& param);

  // A new outermost backward: nothing has fired in it yet.
  void begin_backward();
  // `param` fired; launches every unit that is complete and whose turn it is, when `launch` allows.
  void fired(Unit& unit, Param& param, bool launch);
  // All module calls that used `unit` are through; launches as fired() does.
  void over(Unit& unit, bool launch);
  // The end of a backward, in rounds (Note [Ends] in hooks.h); collective. The first two launch and wait only for what
  // all ranks have launched in the round before. `all_visible`: the user may look at the sums, so ranks agree which units
  // got gradients after their launch, and those are reduced once more.
  void launch_rest(bool all_visible);
  void launch_late();
  // Waits: sums of what had come by the units' launches, within a replica.
  void finish();
  // A unit of this rank got gradients after its launch: from a nested backward, or a use outside of the modules that own
  // the parameter. The unit's next reduction takes them in.
  bool has_late() const;
  // Reduces late gradients now; collective, when any rank has_late().
  void reduce_late();
  // Hybrid sharding: what finish() left is the sum within a replica; from here on it is that over all. Collective.
  void launch_replicas();
  void finish_replicas();
  // A gradient of `unit` that replicas have apart becomes their sum or mean. Collective.
  void reduce_replicas_of(const Unit& unit, const at::Tensor& grad, comm::Label label) const;
  // Whether owned gradients are the sum over all ranks: the same on all of them.
  bool replicas_agree() const { return replicas_agree_ || ranks_.replicate->size() == 1; }
  void set_replicas_agree(bool agree) { replicas_agree_ = agree; }
  // There are more units, in launch order: `joined` among them, whose gradients came past their launch and are reduced now,
  // unless the others are to be reduced yet (`with_others`). Between backwards; collective, all ranks with the same.
  void join(std::vector<Unit*> units, const std::vector<Unit*>& joined, bool with_others);
  // Waits for collectives in flight (after a backward that threw).
  void drain();
  // Drops collectives in flight without throwing; only destroy may follow.
  void abandon();

  void free_buckets() {
    copies_.finish();
    for (BucketPool* pool : {&pool_, &travel_pool_, &sums_})
      pool->free_kept();
  }
  // Buffers of the pool, in bytes, in use and kept.
  int64_t pool_bytes() const { return pool_.bytes() + travel_pool_.bytes() + sums_.bytes(); }
  int64_t peak_pool_bytes() const {  // of each pool by itself
    return pool_.peak_bytes() + travel_pool_.peak_bytes() + sums_.peak_bytes();
  }
  // Forgets all gradients: every unit Empty, and nothing of them held.
  void reset();
  // Those of one unit, of which no reduction is on its way.
  void forget(Unit& unit);

 private:
  struct InFlight {
    Unit* unit = nullptr;
    comm::Pending pending;
    at::Tensor sent;      // where the unit travels in another dtype: its contributions
    at::Tensor sum;       // of the owned range
    at::Tensor bucket;    // the contributions
    bool pooled = false;  // they lie in a bucket of the pool
    // With a sink, by parameter: whether a rank has a gradient, which need not be asked where this one has all.
    at::Tensor present{};
    comm::Pending presence{};
    bool has_all = false;
    at::Tensor before{};  // of gradients in host memory: what they were, on its way back
    std::shared_ptr<c10::Event> came{};
  };

  void begin(Unit& unit);
  void acquire_partial(Unit& unit);
  static shard::Memory slot(Unit& unit, const Param& param, const at::Tensor& row);
  void release_partial(Unit& unit);
  bool comes_soon(InFlight& work);
  void make_room();
  void zero_unfilled(Unit& unit);
  shard::Buffer memory_of_sum(const Unit& unit) const;
  void launch(Unit& unit);
  at::Tensor cast_to_travel(const Unit& unit, const at::Tensor& values);
  void launch_complete();
  at::Tensor filled(const Unit& unit) const;
  void launch_alone(Unit& unit);
  using Release = decltype(ArrivedSum::release);
  void hand_over(Unit& unit, const at::Tensor& sum, const at::Tensor& present, Release release);
  void finish_oldest();
  void use_up(InFlight& work);
  void give_back(InFlight& work);
  void bring_back(InFlight& work);
  void leave(InFlight& work);
  void leave(Unit& unit, const at::Tensor& sum, BucketPool& pool, const at::Tensor& bucket);
  void reopen_replicas();
  void launch_agreement();
  void finish_oldest_replica();
  void add_sum(Unit& unit, const at::Tensor& to, const at::Tensor& from);
  kernels::RandomKey key_of(const Param& param, uint64_t first, uint64_t number) const;
  // How a unit's sum gets its factor (Note [Averaging]): by the reduction, and what is left of it.
  struct Mean {
    comm::ReduceOp op;
    double rest;
  };
  Mean mean_of(const Unit& unit) const;
  static bool one_rank(const Unit& unit) { return unit.ranks.size() == 1; }

  const Ranks& ranks_;
  Phases& phases_;
  std::vector<Unit*> units_;
  double factor_;
  bool overlap_;     // units are launched while the backward goes on
  bool stochastic_;  // Note [Accumulation in 16 bits]
  uint64_t seed_;
  SumSink* sink_ = nullptr;
  bool dropping_ = false;  // what arrives is of no use
  size_t next_ = 0;        // units_[next_] is the next to launch
  bool replicas_agree_ = false;
  std::deque<InFlight> in_flight_, replicas_in_flight_;
  comm::Pending agreement_;
  at::Tensor late_;  // by unit; defined while ranks agree on it
  static constexpr std::chrono::milliseconds kLeastPatience{1}, kMostPatience{100};
  std::chrono::milliseconds patience_ = kMostPatience;
  BucketPool pool_{2};
  BucketPool travel_pool_{2};
  BucketPool sums_{2};  // of gradients that come back from host memory
  GradCopies copies_;
};

}  // namespace tessera::zero

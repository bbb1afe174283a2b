// Unsharder: which units have their parameters gathered, and when: stage 3.
//
// Note [Who keeps a unit gathered]
//   holds   a module scope in its forward, or a GatheredParameters region; counted
//   calls   module calls whose backward has begun and is not over. It is over when gradients have reached all nodes that
//           made the call's inputs: nothing behind its outputs is left to run. A call whose inputs need no gradient, and
//           inside of which no other call ran, is over when all parameters of the unit that require a gradient have it.
//           (For other calls that would be too early: the weight may be used detached as well.) At the end of the
//           outermost backward all calls are over.
//   again   a backward with create_graph used it, or a forward whose graph no hook sees: inside a transformation of torch.func,
//           of dual tensors, or with an output that hides its tensors. Such graphs may read the weights at any time, so they
//           stay until the step. The same on all ranks.
//   kept    its next use comes before any other unit's, or within the reuse distance that the configuration asks for
//   A unit nobody keeps is released at once; buckets are lent to the next unit.
//
// Note [Order of gathers]
//   Gathers follow the order in which modules run, which must be the same on all ranks; what they do inside a unit
//   (which experts of a leaf module, which parameters) may differ. Gathers have a group of their own (comm::Group::
//   sibling), so that they need no common order with reductions. Prefetching looks at the order of the last pass, which
//   is the same on all ranks because the passes were. Slices on a disk (Note [Parameters elsewhere]) are read some units
//   ahead of their gathers, which is each rank's own affair. Shared parameters (flat_params.h) are gathered without communication:
//   calls marked collective are local for them, nothing is gathered early and nothing counts as live but private copies.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "tessera/base/phases.h"
#include "tessera/zero/bucket_pool.h"
#include "tessera/zero/flat_params.h"
#include "tessera/zero/options.h"
#include "tessera/zero/scope_call.h"

namespace tessera::zero {

class Unsharder {
 public:
  // `failed(ranks, why)`: a gather met memory, a device or a disk that fails; so many ranks know.
  using Failed = std::function<void(int ranks, const std::string& why)>;
  Unsharder(const GatherOptions& options, Phases& phases, Failed failed = {});
  // `there`: whether the last update of a unit's slice has come to where the slice lives; with `waits` it waits for that.
  void follow_updates(std::function<bool(int unit, bool waits)> there) { there_ = std::move(there); }

  // Registers a unit, in forward order; returns its number. Units that are not sharded are always there. `group`: gathers
  // it, and does nothing else.
  int add(FlatParams* flat, comm::GroupPtr group);
  bool any_sharded() const { return any_sharded_; }
  bool has_scope(int scope) const { return scope >= 0 && static_cast<size_t>(scope) < scopes_.size(); }

  // ---- forward. A scope is a module: the units its forward and backward read.
  int add_scope(std::vector<int> units);
  // Replaces the units of a scope, of which no call is under way.
  void set_scope(int scope, std::vector<int> units);
  // The scope reads one more unit from now on, of a parameter of another module.
  void extend_scope(int scope, int unit, bool in_backward);
  // The innermost scope under way that holds its units itself; -1 outside.
  int holding_scope() const;
  // Gathers, waits, holds. Collective. `in_backward`: a recomputation. False when scopes around this one hold all its units.
  bool enter(int scope, bool in_backward);
  // Scopes inside the innermost call of `scope` that never ended (an exception past their hooks) end here.
  void end_inner(int scope, bool in_backward);
  // The units a ScopeCall should watch for the innermost call, of `scope`.
  std::vector<int> watched(int scope) const;
  bool had_inner_calls() const { return !stack_.empty() && stack_.back().outer; }  // of the innermost call
  // Ends the innermost call of `scope`. `recorded`: it left a graph behind, which hooks see; `unseen`: one that hooks do not see.
  void leave(int scope, bool in_backward, bool recorded, bool unseen = false);
  // Ends a forward that threw, and scopes that never ended inside it.
  void abort(int scope, bool in_backward);
  void abort_all();
  bool inside_scope() const { return !stack_.empty(); }
  size_t depth() const { return stack_.size(); }  // calls under way

  // ---- backward
  // `calls`: those the backward goes through; a backward inside it may make or open more.
  void begin_backward(const std::vector<ScopeCall*>& calls);
  void call_made(ScopeCall& call);  // a graph holds the call now
  // The backward of a call begins: gathers. Collective. `again`: with create_graph.
  void call_opened(ScopeCall& call, bool again);
  // The gradients of a call's inputs are complete. Returns units whose last open call this was, and which no create_graph reads.
  std::vector<int> call_closed(ScopeCall& call);
  void call_gone(ScopeCall& call);  // the call's graph was freed
  // Parameter `item` got its gradient.
  void gradient_arrived(int unit, int item);
  void end_backward();

  // ---- regions and values
  // Gathers exact values, waits. Collective. `writable`: in memory of this rank's own, also where parameters are shared.
  void hold(int unit, bool writable);
  void unhold(int unit);
  // Releases all that is only kept. State error when a scope or region is open, since parameters are about to change.
  void settle_before_update();
  // Does the same for one unit.
  void settle_before_update(int unit);
  int64_t bytes() const { return pool_.bytes() + staging_.bytes(); }
  int64_t peak_bytes() const { return pool_.peak_bytes() + staging_.peak_bytes(); }  // of each pool by itself
  void free_buckets() {
    pool_.free_kept();
    staging_.free_kept();
  }
  // Frees everything, without communication.
  void abandon(const std::string& message);

 private:
  struct Entry {
    FlatParams* flat = nullptr;
    comm::GroupPtr group;
    int holds = 0;                        // by scopes
    int regions = 0;                      // by regions
    std::vector<const ScopeCall*> calls;  // open ones
    bool kept = false;
    bool again = false;
    int pending = 0;         // calls that the running backward goes through and that are not over
    std::vector<bool> seen;  // items that got a gradient since the last gather
    int missing = 0;         // items that have not
  };
  struct Active {
    int scope;
    bool nested;         // a scope around it holds all its units
    bool outer = false;  // calls inside it held units
  };
  // The uses of units in the order of one pass, to predict the next pass.
  struct Trace {
    std::vector<int> last, now;
    size_t position = 0;    // in `last`, behind the present use
    bool followed = false;  // the present use was foreseen
    void begin();
    void use(int unit);
    int next() const { return followed && position < last.size() ? last[position] : -1; }
  };

  template <class F>
  void announcing(const Entry& entry, const F& gather);
  bool under_way(int scope) const;
  void use(int unit, bool in_backward);
  void await_end(ScopeCall& call);
  void make_ready(Entry& entry, bool exact = false);
  void take_staging(FlatParams& flat);
  void prefetch(const Trace& trace);
  void read_ahead(const Trace& trace);
  void start(Entry& entry, bool exact = false);
  void release_bucket(const FlatParams& flat, const at::Tensor& bucket);
  static bool in_use(const Entry& entry) {
    return entry.holds + entry.regions > 0 || !entry.calls.empty() || entry.again;
  }
  std::vector<int> sharded_of(std::vector<int> units) const;
  void settle(int unit);
  void settle_all(const std::vector<int>& units);
  bool worth_keeping(int unit) const;
  void release(Entry& entry);
  static void check_unused(const Entry& entry, int uses);
  void release_unused(bool kept_too);

  GatherOptions options_;
  Failed failed_;
  std::function<bool(int unit, bool waits)> there_;
  Phases& phases_;
  std::vector<Entry> entries_;
  std::vector<std::vector<int>> scopes_;
  std::vector<Active> stack_;
  Trace forward_, backward_;
  int64_t number_ = 0;  // backwards begun
  int64_t live_ = 0;    // elements gathered or on their way
  bool any_sharded_ = false;
  std::vector<int> reading_;  // units that were read ahead for the present use
  BucketPool pool_{3};
  BucketPool staging_{2};  // for gathers in another dtype
};

}  // namespace tessera::zero

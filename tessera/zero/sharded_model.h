// ShardedModel: the units of one engine and what happens to them in a step, for any stage. The engine above decides
// when (boundaries, counters, schedules); this class knows how.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/named_shard.h"
#include "tessera/zero/data_parallel.h"
#include "tessera/zero/hooks.h"
#include "tessera/zero/options.h"
#include "tessera/zero/plan.h"
#include "tessera/zero/reducer.h"
#include "tessera/zero/shared_params.h"
#include "tessera/zero/unit.h"
#include "tessera/zero/unsharder.h"

namespace tessera::zero {

struct ModelParam {
  std::string name;
  at::Tensor tensor;
  int group = 0;
  std::string unit;
  // Collective, called once before its unit is built: gives a tensor that was partitioned before (early_params.h) its
  // values, equal on all ranks. Empty: the tensor has values; rank 0's hold.
  std::function<void()> restore;
  // What its gradient and, where partitioned, its gathered values travel in; unset: Options::communication, and the
  // parameter's own dtype. Float, Half or BFloat16.
  std::optional<at::ScalarType> comm;
};

struct GradientSummary {
  double norm = 0;  // global L2 norm; not finite if a gradient is not
  bool finite = true;
  bool scaled = false;        // some backward on some rank carried a loss scale
  std::vector<bool> present;  // per parameter: some rank has a gradient
};

// What the reducer may do at the end of the running backward.
struct SyncPolicy {
  bool boundary = true;  // this micro-batch ends an optimizer step
  bool hold = false;     // no_sync or coalesce: accumulate locally
};

class ShardedModel final : private HookSink {
 public:
  // Collective: rank 0's values are broadcast. `params` become views of flat buffers. `frozen`: partitioned where the
  // stage partitions parameters, without gradients and states; their slots follow those of `params`.
  ShardedModel(const Options& options, DataParallel ranks, const std::vector<ModelParam>& params,
               const std::vector<ModelParam>& frozen, optim::Rule rule, const std::vector<optim::GroupOptions>& groups);
  ~ShardedModel() override;

  Hooks& hooks() { return hooks_; }
  void set_sync_policy(SyncPolicy policy) { policy_ = policy; }
  void set_gradient_scale(double scale) { gradient_scale_ = scale; }
  // What accumulated gradients are multiplied by, until the next call. Those of a backward with another scale (that of
  // another engine in a joint loss, or 1 where the engine's outputs were bypassed) are brought to it.
  void set_loss_scale(double scale) { loss_scale_ = scale; }
  // Backwards of the user's that ended, since the beginning.
  int64_t backwards() const { return backwards_; }
  // Before a forward: what the user did to parameters since the last one. Takes in data that was replaced and hooks
  // parameters that began to require gradients. Local.
  void follow_params();

  // ---- modules (module_scopes.cpp); nothing happens where no parameter is partitioned
  bool partitions_params() const { return unsharder_->any_sharded(); }
  // A module whose forward and backward read the parameters `slots`.
  int add_scope(const std::vector<int>& slots);
  // `slot` is read by the innermost module that is running, from now on.
  void use_elsewhere(int slot);
  void extend_scope(int scope, int slot);
  // Around a module's forward. enter: gathers; collective; true when leave() wants inputs and outputs (a module around
  // it does not already take care of its parameters). abort: after an exception.
  bool enter_scope(int scope);
  void note_inputs(const std::vector<at::Tensor>& inputs);
  void leave_scope(int scope, const std::vector<at::Tensor>& outputs);
  void abort_scope(int scope);
  bool inside_scope() const { return unsharder_->inside_scope(); }
  // Ends scopes whose end was never told, before a new outermost forward.
  void end_stray_scopes();

  // ---- regions in which parameters are whole (module_scopes.cpp). Collective.
  // State error when a parameter is in an open region already. `writable` false: it is closed with Writes::None.
  void open_region(const std::vector<int>& slots, bool writable);
  void close_region(const std::vector<int>& slots, Writes writes, int writer);
  bool is_gathered(int slot) const;
  ParamPartition partition_of(int slot) const;

  // ---- gradients
  // Everything accumulated so far is reduced on return. Collective where something is left to reduce.
  void ensure_reduced();
  // Reduces now, whatever the policy. Collective.
  void reduce_now();
  // Norm, finite check and presence, agreed on all ranks. Collective. Gradients must be reduced.
  GradientSummary summarize();
  void drop_gradients();
  bool has_gradients() const { return unreduced_ || flushed_; }

  // ---- update. Collective (refresh of the compute parameters).
  // Gradients are multiplied by `scale` (unscale and clip). Parameters without a gradient on any rank are left alone.
  void update(const GradientSummary& summary, double scale, const std::function<void()>& external);
  // A client's optimizer is given the gradients themselves, and no copy in another dtype.
  bool client_reads_gradients() const;
  void scale_gradients(double scale);  // what this rank owns of them; local
  std::vector<optim::GroupOptions>& groups() { return groups_; }
  void refresh_params();
  // Masters from the compute parameters that were edited since our last write. Edits are known by the tensor's version
  // or its storage; `compare` also finds those that leave both alone (p.data.copy_()), for a read of all values. Local.
  void adopt_params(bool compare);

  // ---- access (state_access.cpp); `slot` is the index in the constructor's list
  using Quantity = shard::Quantity;
  at::Tensor get_full(int slot, Quantity what);
  void set_full(int slot, Quantity what, const at::Tensor& value);
  at::Tensor local_view(int slot, Quantity what);
  void set_local(int slot, Quantity what, const at::Tensor& value);  // collective for shared parameters' masters
  shard::Range local_range(int slot) const;
  // See engine.h; `param` counts slots here.
  std::vector<shard::NamedShard> named_shards() const;
  at::Tensor read_shard(const shard::NamedShard& shard);
  // For values of which the client keeps the parts: see engine.h.
  at::Tensor gather_full(int slot, const at::Tensor& part);
  at::Tensor local_part(int slot, const at::Tensor& full);
  double agree_max(double value);
  Param& param(int slot) { return *slots_[slot].param; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const std::vector<std::unique_ptr<FlatParams>>& frozen() const { return frozen_; }
  int64_t shared_bytes() const { return shared_.bytes(); }
  int64_t pool_bytes() const { return reducer_->pool_bytes() + unsharder_->bytes(); }
  int64_t peak_pool_bytes() const { return reducer_->peak_pool_bytes() + unsharder_->peak_bytes(); }

  // Removes hooks and frees gradients and states; parameters keep their values.
  void release();

 private:
  struct Slot {
    Unit* unit = nullptr;
    Param* param = nullptr;
  };
  // Any parameter, frozen ones too: its place among the flat parameters.
  struct Place {
    int unit = -1;  // in the unsharder
    int item = -1;
    FlatParams* flat = nullptr;
    bool open = false;      // in a region
    bool writable = false;  // in one that may write
    at::Tensor before{};    // in a region, of whole parameters with a split master: their owned values at its begin
  };

  void backward_begun(const std::vector<ScopeCall*>& calls) override;
  void before_accumulate(int slot, at::Tensor& grad) override;
  void gradient_ready(int slot, at::Tensor& grad) override;
  bool end_backward(int round) override;
  void tasks_ended() override;
  void call_opened(ScopeCall& call, bool again) override;
  void call_closed(ScopeCall& call) override;
  void call_gone(ScopeCall& call) override;

  at::ScalarType travel_of(const ModelParam& param) const;
  at::ScalarType gather_dtype_of(const ModelParam& param) const;
  std::string travels_of(int kind, const ModelParam& param) const;
  std::vector<PlannedUnit> plan(const std::vector<ModelParam>& params, const std::vector<ModelParam>& frozen) const;
  SharedParams share(const std::vector<PlannedUnit>& units, const std::vector<ModelParam>& params,
                     const std::vector<ModelParam>& frozen) const;
  at::Tensor space_of(const std::vector<const ModelParam*>& members);
  void build_unit(const PlannedUnit& planned, const std::vector<ModelParam>& params);
  void build_frozen(const PlannedUnit& planned, const std::vector<ModelParam>& frozen, size_t trained);
  void watch_call_of(std::vector<int> units, const std::vector<at::Tensor>& outputs,
                     const std::vector<compat::NodePtr>& producers, bool open_now);
  void take_writes(const std::vector<int>& slots, Writes writes, int writer);
  bool may_reduce() const;
  bool flush_round(int round);
  void flush();
  void reduce_replicas();
  void adopt_visible_grads();
  void show_remote_grads();
  bool is_visible_view(const Slot& slot, const at::Tensor& grad) const;
  void check_all_watched() const;
  std::vector<bool> agree_presence(int64_t missing_anywhere);
  void update_unit(Unit& unit, const GradientSummary& summary, double scale);
  void update_external(const GradientSummary& summary, double scale, const std::function<void()>& external);
  at::ScalarType client_dtype() const;
  void gather_unit(Unit& unit, std::vector<comm::Pending>& pending);
  at::Tensor owned_buffer(const Slot& slot, Quantity what) const;
  at::Tensor gather_flat(const Slot& slot, const at::Tensor& part);
  shard::Range local_range_of(const Slot& slot) const;
  void settle_empty_units();
  bool reads_local_gradient(const Slot& slot) const;
  void adopt_param(const Slot& slot, bool compare);
  static bool is_bound(const Param& param, const Unit& unit);
  void check_no_region_writes() const;
  void check_scope(int scope) const;

  Options options_;
  shard::StagePlacements placements_;
  DataParallel ranks_;
  optim::Rule rule_;
  std::vector<optim::GroupOptions> groups_;
  SharedParams shared_;
  std::vector<std::unique_ptr<Unit>> units_;  // launch order
  std::vector<std::unique_ptr<FlatParams>> frozen_;
  std::vector<Slot> slots_;
  std::vector<Place> places_;
  std::vector<Unit*> unit_of_number_;  // by number in the unsharder; null: frozen
  comm::GroupPtr gathers_;             // what is not ordered with reductions
  std::unique_ptr<Unsharder> unsharder_;
  std::unique_ptr<Reducer> reducer_;
  // Producers of the inputs of module calls under way, innermost last; empty for those inside others.
  std::vector<std::vector<compat::NodePtr>> producers_;
  std::vector<at::Tensor> external_grads_;  // per unit, fp32, only inside an external update
  SyncPolicy policy_;
  double gradient_scale_ = 1;
  double loss_scale_ = 1;
  bool scaled_ = false;  // a loss scale came since the last step
  int64_t backwards_ = 0;
  bool unreduced_ = false;  // a backward ended without a flush: the same on all ranks
  bool flushed_ = false;    // flushed since the last step
  Hooks hooks_;             // last: removed first
};

}  // namespace tessera::zero

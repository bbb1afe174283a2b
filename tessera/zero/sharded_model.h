// ShardedModel: the units of one engine and what happens to them in a step, for any stage. The engine above decides
// when (boundaries, counters, schedules); this class knows how.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/optim/optimizer.h"
#include "tessera/zero/hooks.h"
#include "tessera/zero/options.h"
#include "tessera/zero/reducer.h"
#include "tessera/zero/unit.h"

namespace tessera::zero {

struct ModelParam {
  std::string name;
  at::Tensor tensor;
  int group = 0;
  std::string unit;
};

struct GradientSummary {
  double norm = 0;  // global L2 norm; not finite if a gradient is not
  bool finite = true;
  std::vector<bool> present;  // per parameter: some rank has a gradient
};

// What the reducer may do at the end of the running backward.
struct SyncPolicy {
  bool boundary = true;  // this micro-batch ends an optimizer step
  bool hold = false;     // no_sync or coalesce: accumulate locally
};

class ShardedModel final : private HookSink {
 public:
  // Collective: rank 0's values are broadcast. `params` become views of flat buffers.
  ShardedModel(const Options& options, comm::GroupPtr group, std::vector<ModelParam> params, optim::Rule rule,
               const std::vector<optim::GroupOptions>& groups);
  ~ShardedModel() override;

  Hooks& hooks() { return hooks_; }
  void set_sync_policy(SyncPolicy policy) { policy_ = policy; }
  void set_gradient_scale(double scale) { gradient_scale_ = scale; }
  // Backwards of the user's that ended, since the beginning.
  int64_t backwards() const { return backwards_; }
  // Hooks parameters that began to require gradients since the last call.
  void watch_new_params();

  // ---- gradients
  // Everything accumulated so far is reduced on return. Collective where something is left to reduce.
  void ensure_reduced();
  // Reduces now, whatever the policy. Collective.
  void reduce_now();
  // Norm, finite check and presence, agreed on all ranks. Collective. Gradients must be reduced.
  GradientSummary summarize();
  void drop_gradients();

  // ---- update. Collective (refresh of the compute parameters).
  // Gradients are multiplied by `scale` (unscale and clip). Parameters without a gradient on any rank are left alone.
  void update(const GradientSummary& summary, double scale, const std::function<void()>& external);
  std::vector<optim::GroupOptions>& groups() { return groups_; }
  void refresh_params();
  // Masters from the compute parameters that were edited since our last write. Edits are known by the tensor's version
  // or its storage; `compare` also finds those that leave both alone (p.data.copy_()), for a read of all values. Local.
  void adopt_params(bool compare);

  // ---- access (state_access.cpp); `slot` is the index in the constructor's list
  enum class Buffer { Master, Gradient, State0, State1 };
  at::Tensor get_full(int slot, Buffer what);
  void set_full(int slot, Buffer what, const at::Tensor& value);
  at::Tensor local_view(int slot, Buffer what);
  shard::Range local_range(int slot) const;
  Param& param(int slot) { return *slots_[slot].param; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  int64_t pool_bytes() const { return reducer_->pool_bytes(); }

  // Removes hooks and frees gradients and states; parameters keep their values.
  void release();

 private:
  struct Slot {
    Unit* unit = nullptr;
    Param* param = nullptr;
  };

  void backward_begun() override;
  void before_accumulate(int slot, at::Tensor& grad) override;
  void gradient_ready(int slot, at::Tensor& grad) override;
  void backward_done() override;

  bool may_reduce() const;
  void flush(bool agree_refired);
  void adopt_visible_grads();
  void show_remote_grads();
  bool is_visible_view(const Slot& slot, const at::Tensor& grad) const;
  std::vector<bool> agree_presence(int64_t missing_anywhere);
  void update_unit(Unit& unit, const GradientSummary& summary, double scale);
  void update_external(const GradientSummary& summary, double scale, const std::function<void()>& external);
  void gather_unit(Unit& unit, std::vector<comm::Pending>& pending);
  at::Tensor owned_buffer(const Slot& slot, Buffer what) const;
  void settle_empty_units();
  bool reads_local_gradient(const Slot& slot) const;
  void adopt_param(const Slot& slot, bool compare);

  Options options_;
  shard::StagePlacements placements_;
  comm::GroupPtr group_;
  optim::Rule rule_;
  std::vector<optim::GroupOptions> groups_;
  std::vector<std::unique_ptr<Unit>> units_;  // launch order
  std::vector<Slot> slots_;
  std::unique_ptr<Reducer> reducer_;
  std::vector<at::Tensor> external_grads_;  // per unit, fp32, only inside an external update
  SyncPolicy policy_;
  double gradient_scale_ = 1;
  int64_t backwards_ = 0;
  bool unreduced_ = false;  // a backward ended without a flush: the same on all ranks
  bool flushed_ = false;    // flushed since the last step
  Hooks hooks_;             // last: removed first
};

}  // namespace tessera::zero

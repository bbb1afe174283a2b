#include "tessera/zero/sharded_model.h"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/plan.h"

namespace tessera::zero {

namespace {

void check_params(const std::vector<ModelParam>& params, const std::vector<optim::GroupOptions>& groups) {
  std::unordered_set<const void*> seen;
  for (const ModelParam& p : params) {
    TESSERA_CHECK_VALUE(p.tensor.is_leaf(), "zero", "parameter '", p.name, "' is not a leaf tensor");
    TESSERA_CHECK_VALUE(at::isFloatingType(p.tensor.scalar_type()), "zero", "parameter '", p.name,
                        "' cannot be trained: its dtype is ", p.tensor.scalar_type());
    TESSERA_CHECK_VALUE(p.group >= 0 && p.group < static_cast<int>(groups.size()), "zero", "parameter '", p.name,
                        "' names param group ", p.group, " of ", groups.size());
    TESSERA_CHECK_VALUE(seen.insert(p.tensor.unsafeGetTensorImpl()).second, "zero", "parameter '", p.name,
                        "' is given more than once");
    shard::check_device(p.tensor.device());
  }
}

// Rank 0's values into every rank's originals, one collective for all of them.
void broadcast_values(comm::Group& group, const std::vector<Param>& params, const std::string& unit) {
  if (group.size() == 1) return;
  std::vector<at::Tensor> flat;
  flat.reserve(params.size());
  for (const Param& p : params) {
    flat.push_back(shard::flatten_like_param(p.tensor, p.tensor).to(at::kFloat));
  }
  const at::Tensor all = at::cat(flat);
  flat.clear();
  group.broadcast(all, 0, "initial values of unit '" + unit + "'").wait();
  int64_t begin = 0;
  for (const Param& p : params) {
    const int64_t n = p.tensor.numel();
    const at::Tensor value = all.narrow(0, begin, n);
    const at::Tensor mine = p.tensor.detach();
    if (mine.is_non_overlapping_and_dense()) {
      mine.copy_(value.as_strided(mine.sizes(), mine.strides(), value.storage_offset()));
    } else {
      mine.copy_(value.view(mine.sizes()));
    }
    begin += n;
  }
}

}  // namespace

ShardedModel::ShardedModel(const Options& options, comm::GroupPtr group, std::vector<ModelParam> params,
                           optim::Rule rule, const std::vector<optim::GroupOptions>& groups)
    : options_(options),
      placements_(shard::placements_of_stage(options.stage)),
      group_(std::move(group)),
      rule_(rule),
      groups_(groups),
      hooks_(*this) {
  TESSERA_CHECK_BUILT(placements_.params == shard::Placement::Replicate, "zero",
                      "zero_optimization.stage 3 is not served by this version; use stage 0, 1 or 2");
  const c10::AutoGradMode no_grad(false);
  check_params(params, groups_);
  std::vector<PlanItem> items;
  items.reserve(params.size());
  for (const ModelParam& p : params)
    items.push_back({p.unit, p.tensor.numel(), p.group});
  auto plan = plan_units(items, options.min_unit_elements, options.reduce_bucket_size);
  std::reverse(plan.begin(), plan.end());
  // Gradients of the root (embeddings) are complete last: it is launched last.
  std::stable_partition(plan.begin(), plan.end(), [](const PlannedUnit& u) { return !u.name.starts_with(kRootUnit); });

  slots_.resize(params.size());
  std::vector<Unit*> order;
  const auto names = optim::state_names(rule_, groups_);
  for (const PlannedUnit& planned : plan) {
    std::vector<Param> members;
    for (const int i : planned.items) {
      Param member;
      member.name = params[i].name;
      member.tensor = params[i].tensor;
      member.index = i;
      member.group = params[i].group;
      members.push_back(std::move(member));
    }
    broadcast_values(*group_, members, planned.name);
    auto unit =
        std::make_unique<Unit>(planned.name, std::move(members), options_, placements_, group_->rank(), group_->size());
    if (rule_ != optim::Rule::External) unit->allocate_states(names.count, groups_, rule_);
    for (Param& p : unit->params)
      slots_[p.index] = {unit.get(), &p};
    order.push_back(unit.get());
    units_.push_back(std::move(unit));
  }
  reducer_ = std::make_unique<Reducer>(group_, std::move(order), options_.average, options_.overlap);
  watch_new_params();
}

ShardedModel::~ShardedModel() {
  release();
}

void ShardedModel::watch_new_params() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& tensor = slots_[i].param->tensor;
    const int slot = static_cast<int>(i);
    if (tensor.requires_grad() && !hooks_.watches(slot))
      hooks_.watch(tensor, slot, slots_[i].unit->grads_are_visible());
  }
}

bool ShardedModel::may_reduce() const {
  if (policy_.hold || options_.reduce_at_step) return false;
  return placements_.reduce_at == shard::ReduceAt::EveryBackward || policy_.boundary;
}

void ShardedModel::backward_begun() {
  reducer_->begin_backward();
}

bool ShardedModel::is_visible_view(const Slot& slot, const at::Tensor& grad) const {
  return shard::is_bound(grad, slot.unit->grads, slot.param->range) &&
         (grad.numel() == 0 || grad.storage().is_alias_of(slot.unit->grads.storage()));
}

void ShardedModel::before_accumulate(int index, at::Tensor& grad) {
  const Slot& slot = slots_[index];
  if (!grad.defined()) {
    if (slot.param->has_grad) reducer_->clear(*slot.unit, *slot.param);  // the user dropped it
    return;
  }
  const at::Tensor old = grad;
  grad.reset();
  if (is_visible_view(slot, old) && slot.param->has_grad) return;
  reducer_->clear(*slot.unit, *slot.param);
  reducer_->accumulate(*slot.unit, *slot.param, old, 1.0);
}

void ShardedModel::gradient_ready(int index, at::Tensor& grad) {
  const Slot& slot = slots_[index];
  if (grad.defined()) {
    at::Tensor dense = grad.is_sparse() ? grad.to_dense() : grad;
    grad.reset();
    TESSERA_CHECK(dense.sizes() == slot.param->tensor.sizes(), "zero", "gradient of '", slot.param->name,
                  "' has shape ", dense.sizes(), ", the parameter ", slot.param->tensor.sizes());
    reducer_->accumulate(*slot.unit, *slot.param, dense, gradient_scale_);
  }
  // Also where this graph task brought nothing: before_accumulate took away what earlier ones left.
  if (slot.unit->grads_are_visible() && slot.param->has_grad) {
    grad = shard::view_as_param(slot.unit->grads, slot.param->range, slot.param->tensor);
  }
  if (!hooks_.in_forward_task()) reducer_->fired(*slot.unit, *slot.param, may_reduce());
}

void ShardedModel::backward_done() {
  ++backwards_;
  if (may_reduce()) {
    flush(hooks_.saw_nested());
  } else {
    unreduced_ = true;
  }
}

void ShardedModel::flush(bool agree_refired) {
  const c10::AutoGradMode no_grad(false);
  reducer_->flush(agree_refired);
  unreduced_ = false;
  flushed_ = true;
  if (placements_.grads == shard::Placement::Replicate && group_->size() > 1) show_remote_grads();
}

// Stage 0: a parameter without a gradient on this rank has one when other ranks do. They need not tell: a slot that is
// not zero after the reduction says so, and where it is zero (their gradients were) p.grad None means the same.
void ShardedModel::show_remote_grads() {
  for (const Slot& slot : slots_) {
    Param& p = *slot.param;
    if (p.has_grad || !p.tensor.requires_grad()) continue;
    const at::Tensor sum = shard::view_as_param(slot.unit->grads, p.range, p.tensor);
    if (!sum.any().item<bool>()) continue;
    p.has_grad = true;
    p.tensor.mutable_grad() = sum;
  }
}

void ShardedModel::reduce_now() {
  const std::lock_guard lock(hooks_.mutex());
  flush(false);
}

void ShardedModel::ensure_reduced() {
  const std::lock_guard lock(hooks_.mutex());
  if (unreduced_ || !flushed_) flush(false);
  if (placements_.grads == shard::Placement::Replicate) adopt_visible_grads();
}

// Stage 0: p.grad is the user's. What stands there now is the gradient.
void ShardedModel::adopt_visible_grads() {
  for (const Slot& slot : slots_) {
    at::Tensor& grad = slot.param->tensor.mutable_grad();
    const at::Tensor view = shard::view_as_param(slot.unit->grads, slot.param->range, slot.param->tensor);
    if (!grad.defined()) {
      if (slot.param->has_grad) view.zero_();  // the user dropped it
      slot.param->has_grad = false;
      continue;
    }
    if (!is_visible_view(slot, grad)) view.copy_(grad.is_sparse() ? grad.to_dense() : grad);
    slot.param->has_grad = true;
  }
}

void ShardedModel::drop_gradients() {
  const std::lock_guard lock(hooks_.mutex());
  reducer_->reset();
  unreduced_ = flushed_ = false;
  for (const Slot& slot : slots_)
    slot.param->tensor.mutable_grad().reset();
}

void ShardedModel::release() {
  hooks_.remove();
  if (reducer_) reducer_->abandon();
  for (auto& unit : units_) {
    unit->grads.reset();
    unit->partial.reset();
    unit->master.reset();
    for (at::Tensor& state : unit->states)
      state.reset();
  }
  units_.clear();
  slots_.clear();
}

}  // namespace tessera::zero

#include "tessera/zero/sharded_model.h"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/device.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/plan.h"

namespace tessera::zero {

namespace {

// Kinds of parameters, see PlanItem.
constexpr int kPartitioned = 0, kResident = 1, kFrozen = 2;

void check_params(const std::vector<ModelParam>& params, const std::vector<optim::GroupOptions>& groups) {
  for (const ModelParam& p : params) {
    TESSERA_CHECK_VALUE(p.tensor.is_leaf(), "zero", "parameter '", p.name, "' is not a leaf tensor");
    TESSERA_CHECK_VALUE(at::isFloatingType(p.tensor.scalar_type()), "zero", "parameter '", p.name,
                        "' cannot be trained: its dtype is ", p.tensor.scalar_type());
    TESSERA_CHECK_VALUE(p.group >= 0 && p.group < static_cast<int>(groups.size()), "zero", "parameter '", p.name,
                        "' names param group ", p.group, " of ", groups.size());
    shard::check_device(p.tensor.device());
    TESSERA_CHECK_VALUE(p.tensor.device() == params.front().tensor.device(), "zero", "parameter '", p.name,
                        "' is on device '", p.tensor.device(), "', parameter '", params.front().name, "' on '",
                        params.front().tensor.device(), "'; an engine trains a model on one device");
  }
}

// Gives every parameter of a unit its values, equal on all ranks.
std::vector<FlatParams::Item> settle_values(const DataParallel& ranks, const std::string& unit,
                                            const std::vector<const ModelParam*>& members) {
  std::vector<FlatParams::Item> all, fresh;
  for (const ModelParam* p : members) {
    all.push_back({p->name, p->tensor});
    if (p->restore) {
      p->restore();
    } else {
      fresh.push_back(all.back());
    }
  }
  broadcast_values(ranks, fresh, "unit '" + unit + "'");
  return all;
}

}  // namespace

ShardedModel::ShardedModel(const Options& options, DataParallel ranks, const std::vector<ModelParam>& params,
                           const std::vector<ModelParam>& frozen, optim::Rule rule,
                           const std::vector<optim::GroupOptions>& groups)
    : options_(options),
      placements_(shard::placements_of_stage(options.stage)),
      ranks_(std::move(ranks)),
      rule_(rule),
      groups_(groups),
      hooks_(*this) {
  const c10::AutoGradMode no_grad(false);
  check_params(params, groups_);
  if (!params.empty()) ranks_.device = params.front().tensor.device();
  // Of its own: engines under one loss reach their collectives in orders that differ by rank.
  if (ranks_.shard->size() > 1) ranks_.shard = ranks_.shard->sibling();
  if (ranks_.replicate->size() > 1) ranks_.replicate = ranks_.replicate->sibling();
  const bool partition = placements_.params == shard::Placement::Shard && ranks_.shard->size() > 1;
  gathers_ = partition ? ranks_.shard->sibling() : ranks_.shard;
  unsharder_ = std::make_unique<Unsharder>(gathers_, options_.gather);
  slots_.resize(params.size());
  places_.resize(params.size() + frozen.size());
  const std::vector<PlannedUnit> planned_units = plan(params, frozen);
  shared_ = share(planned_units, params, frozen);
  for (const PlannedUnit& planned : planned_units) {
    if (planned.kind == kFrozen) {
      build_frozen(planned, frozen, params.size());
    } else {
      build_unit(planned, params);
    }
  }
  shared_.written("the initial values");
  uint64_t first = 0;
  for (const Slot& slot : slots_) {
    slot.param->first = first;
    first += static_cast<uint64_t>(slot.param->tensor.numel());
  }
  // Gradients are complete from the last unit of the forward to the first; those of the root (embeddings) and of
  // resident units, which modules all over the model use, last.
  std::reverse(units_.begin(), units_.end());
  std::stable_partition(units_.begin(), units_.end(), [](const auto& u) { return !u->root; });
  std::stable_partition(units_.begin(), units_.end(), [](const auto& u) { return u->launch_at() != LaunchAt::Flush; });
  std::vector<Unit*> order;
  order.reserve(units_.size());
  for (const auto& unit : units_)
    order.push_back(unit.get());
  reducer_ = std::make_unique<Reducer>(ranks_, std::move(order), options_);
  follow_params();
}

at::ScalarType ShardedModel::travel_of(const ModelParam& param) const {
  if (ranks_.size() == 1) return options_.precision.grad;
  return param.comm.value_or(options_.communication.value_or(options_.precision.grad));
}

// Never wider than the parameter: there is nothing to gain.
at::ScalarType ShardedModel::gather_dtype_of(const ModelParam& param) const {
  const at::ScalarType own = options_.precision.param;
  if (ranks_.size() == 1 || !param.comm) return own;
  return c10::elementSize(*param.comm) < c10::elementSize(own) ? *param.comm : own;
}

// See PlanItem.
std::string ShardedModel::travels_of(int kind, const ModelParam& param) const {
  const at::ScalarType asked = param.comm.value_or(options_.communication.value_or(at::kFloat));
  TESSERA_CHECK_VALUE(asked == at::kFloat || asked == at::kHalf || asked == at::kBFloat16, "zero", "parameter '",
                      param.name, "' cannot travel in ", asked, "; choose Float, Half or BFloat16");
  std::string text;
  const at::ScalarType gathered = gather_dtype_of(param), travel = travel_of(param);
  if (placements_.params == shard::Placement::Shard && kind != kResident && gathered != options_.precision.param) {
    text += std::string(" (gathered in ") + c10::toString(gathered) + ")";
  }
  if (kind != kFrozen && travel != options_.precision.grad) {
    text += std::string(" (reduced in ") + c10::toString(travel) + ")";
  }
  return text;
}

std::vector<PlannedUnit> ShardedModel::plan(const std::vector<ModelParam>& params,
                                            const std::vector<ModelParam>& frozen) const {
  const bool partition = placements_.params == shard::Placement::Shard && ranks_.shard->size() > 1;
  int64_t resident = 0;
  std::vector<PlanItem> items;
  items.reserve(params.size() + frozen.size());
  for (const ModelParam& p : params) {
    const int64_t n = p.tensor.numel();
    const bool stays =
        partition && n <= options_.gather.persistence_threshold && n <= options_.gather.model_persistence - resident;
    if (stays) resident += n;
    const int kind = stays ? kResident : kPartitioned;
    items.push_back({p.unit, n, p.group, kind, travels_of(kind, p)});
  }
  for (const ModelParam& p : frozen)
    items.push_back({p.unit, p.tensor.numel(), 0, kFrozen, travels_of(kFrozen, p)});
  return plan_units(items, options_.min_unit_elements, options_.reduce_bucket_size);
}

SharedParams ShardedModel::share(const std::vector<PlannedUnit>& units, const std::vector<ModelParam>& params,
                                 const std::vector<ModelParam>& frozen) const {
  const int size = ranks_.shard->size();
  if (!options_.share_params || size == 1 || placements_.states == shard::Placement::Replicate) return {};
  int64_t bytes = 0;
  std::vector<int64_t> numels;
  for (const PlannedUnit& unit : units) {
    numels.clear();
    for (const int i : unit.items) {
      const auto at = static_cast<size_t>(i);
      const ModelParam& p = at < params.size() ? params[at] : frozen[at - params.size()];
      TESSERA_CHECK_VALUE(p.tensor.is_cpu(), "zero", "tessera.shared_parameters is for ranks on the CPU; parameter '",
                          p.name, "' is on ", p.tensor.device());
      numels.push_back(p.tensor.numel());
    }
    bytes += SharedParams::bytes_of(shard::Layout(numels, size), options_.precision.param);
  }
  return {gathers_, bytes};
}

// Undefined where nothing is shared.
at::Tensor ShardedModel::space_of(const std::vector<const ModelParam*>& members) {
  std::vector<int64_t> numels;
  numels.reserve(members.size());
  for (const ModelParam* p : members)
    numels.push_back(p->tensor.numel());
  return shared_.take(shard::Layout(numels, ranks_.shard->size()), options_.precision.param);
}

void ShardedModel::build_unit(const PlannedUnit& planned, const std::vector<ModelParam>& params) {
  std::vector<Param> members;
  std::vector<const ModelParam*> originals;
  for (const int i : planned.items) {
    Param member;
    member.name = params[i].name;
    member.tensor = params[i].tensor;
    member.index = i;
    member.group = params[i].group;
    members.push_back(std::move(member));
    originals.push_back(&params[i]);
  }
  settle_values(ranks_, planned.name, originals);
  auto unit = std::make_unique<Unit>(planned.name, std::move(members), options_, placements_, planned.kind == kResident,
                                     ranks_.shard->rank(), ranks_.shard->size(), space_of(originals));
  unit->root = planned.root;
  unit->travel = travel_of(*originals.front());
  unit->flat->gather_in(gather_dtype_of(*originals.front()));
  const auto names = optim::state_names(rule_, groups_);
  if (rule_ != optim::Rule::External) unit->allocate_states(names.count, groups_, rule_);
  unit->number = unsharder_->add(unit->flat.get());
  unit_of_number_.push_back(unit.get());
  for (size_t i = 0; i < unit->params.size(); ++i) {
    Param& p = unit->params[i];
    slots_[p.index] = {unit.get(), &p};
    places_[p.index] = {unit->number, static_cast<int>(i), unit->flat.get()};
  }
  units_.push_back(std::move(unit));
}

void ShardedModel::build_frozen(const PlannedUnit& planned, const std::vector<ModelParam>& frozen, size_t trained) {
  std::vector<const ModelParam*> originals;
  originals.reserve(planned.items.size());
  for (const int i : planned.items)
    originals.push_back(&frozen[i - trained]);
  std::vector<FlatParams::Item> items = settle_values(ranks_, planned.name, originals);
  const bool sharded = placements_.params == shard::Placement::Shard;
  auto flat = std::make_unique<FlatParams>(planned.name, std::move(items), options_.precision.param,
                                           ranks_.shard->rank(), ranks_.shard->size(), sharded, space_of(originals));
  flat->gather_in(gather_dtype_of(*originals.front()));
  const int number = unsharder_->add(flat.get());
  unit_of_number_.push_back(nullptr);
  for (size_t i = 0; i < planned.items.size(); ++i)
    places_[planned.items[i]] = {number, static_cast<int>(i), flat.get()};
  frozen_.push_back(std::move(flat));
}

ShardedModel::~ShardedModel() {
  release();
}

void ShardedModel::follow_params() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.unit->flat->sharded() && !is_bound(*slot.param, *slot.unit)) adopt_param(slot, /*compare=*/false);
    const at::Tensor& tensor = slot.param->tensor;
    const int number = static_cast<int>(i);
    if (tensor.requires_grad() && !hooks_.watches(tensor, number))
      hooks_.watch(tensor, number, slot.unit->grads_are_visible());
  }
}

// A conversion (module.float()) gives a parameter a new accumulator, without our hook until follow_params(). Gradients
// that came by that way were not scaled, not reduced and are not ours to guess.
void ShardedModel::check_all_watched() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Param& p = *slots_[i].param;
    const at::Tensor& grad = p.tensor.grad();
    // Stage 0: the conversion took along what was reduced.
    if (!grad.defined() || (slots_[i].unit->grads_are_visible() && p.has_grad)) continue;
    TESSERA_CHECK(
        !p.tensor.requires_grad() || hooks_.watches(p.tensor, static_cast<int>(i)), "zero", "parameter '", p.name,
        "' was converted (module.to(...)) and got gradients past the engine: call the engine, not its module, "
        "for the first forward after a conversion; engine.zero_grad() drops them");
  }
}

bool ShardedModel::may_reduce() const {
  if (policy_.hold || options_.reduce_at_step) return false;
  return placements_.reduce_at == shard::ReduceAt::EveryBackward || policy_.boundary;
}

void ShardedModel::backward_begun(const std::vector<ScopeCall*>& calls) {
  reducer_->begin_backward();
  unsharder_->begin_backward(calls);
}

bool ShardedModel::is_visible_view(const Slot& slot, const at::Tensor& grad) const {
  return shard::is_bound(grad, slot.unit->grads, slot.param->range, slot.param->form) &&
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
    const double carried = hooks_.loss_scale();
    scaled_ = scaled_ || carried != 1;
    reducer_->accumulate(*slot.unit, *slot.param, dense, gradient_scale_ * (loss_scale_ / carried));
  }
  // Also where this graph task brought nothing: before_accumulate took away what earlier ones left.
  if (slot.unit->grads_are_visible() && slot.param->has_grad) {
    grad = shard::view_as_param(slot.unit->grads, slot.param->range, slot.param->form);
  }
  unsharder_->gradient_arrived(places_[index].unit, places_[index].item);
  if (!hooks_.in_forward_task()) reducer_->fired(*slot.unit, *slot.param, may_reduce());
}

bool ShardedModel::end_backward(int round) {
  if (round == 0) ++backwards_;
  if (may_reduce()) return flush_round(round);
  unreduced_ = true;
  return false;
}

// See Note [Ends] in hooks.h.
bool ShardedModel::flush_round(int round) {
  const c10::AutoGradMode no_grad(false);
  const bool visible = placements_.grads == shard::Placement::Replicate;
  switch (round) {
    case 0:
      reducer_->launch_rest(visible);
      return true;
    case 1:
      reducer_->launch_late();
      return true;
    case 2:
      reducer_->finish();
      if (policy_.boundary) reducer_->launch_replicas();
      return true;
    default:
      reducer_->finish_replicas();
      unreduced_ = false;
      flushed_ = true;
      if (visible && ranks_.size() > 1) show_remote_grads();
      return false;
  }
}

void ShardedModel::flush() {
  for (int round = 0; flush_round(round); ++round) {
  }
}

void ShardedModel::reduce_replicas() {
  reducer_->launch_replicas();
  reducer_->finish_replicas();
}

// Stage 0: a parameter without a gradient on this rank has one when other ranks do. They need not tell: a slot that is
// not zero after the reduction says so, and where it is zero (their gradients were) p.grad None means the same.
void ShardedModel::show_remote_grads() {
  for (const Slot& slot : slots_) {
    Param& p = *slot.param;
    if (p.has_grad || !p.tensor.requires_grad()) continue;
    const at::Tensor sum = shard::view_as_param(slot.unit->grads, p.range, p.form);
    if (!sum.any().item<bool>()) continue;
    p.has_grad = true;
    p.tensor.mutable_grad() = sum;
  }
}

void ShardedModel::reduce_now() {
  const std::lock_guard lock(hooks_.mutex());
  flush();
}

void ShardedModel::ensure_reduced() {
  const std::lock_guard lock(hooks_.mutex());
  check_all_watched();
  if (unreduced_ || !flushed_) flush();
  reduce_replicas();
  if (placements_.grads == shard::Placement::Replicate) adopt_visible_grads();
}

// Stage 0: p.grad is the user's. What stands there now is the gradient.
void ShardedModel::adopt_visible_grads() {
  for (const Slot& slot : slots_) {
    at::Tensor& grad = slot.param->tensor.mutable_grad();
    const at::Tensor view = shard::view_as_param(slot.unit->grads, slot.param->range, slot.param->form);
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
  unreduced_ = flushed_ = scaled_ = false;
  for (const Slot& slot : slots_)
    slot.param->tensor.mutable_grad().reset();
}

void ShardedModel::release() {
  hooks_.remove();
  if (reducer_) reducer_->abandon();
  if (unsharder_) unsharder_->abandon("its engine was destroyed; gather it before, or save a checkpoint");
  for (auto& unit : units_) {
    unit->grads.reset();
    unit->partial.reset();
    unit->master.reset();
    unit->residual.reset();
    for (at::Tensor& state : unit->states)
      state.reset();
  }
  units_.clear();
  frozen_.clear();
  slots_.clear();
  places_.clear();
}

}  // namespace tessera::zero

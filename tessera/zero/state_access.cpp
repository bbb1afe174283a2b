// ShardedModel: full and local views of masters, gradients and optimizer states.
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/sharded_model.h"

namespace tessera::zero {

at::Tensor ShardedModel::owned_buffer(const Slot& slot, Quantity what) const {
  Unit& unit = *slot.unit;
  switch (what) {
    case Quantity::Weight:
      TESSERA_CHECK_VALUE(false, "engine", "weights are read and written through the parameter ('", slot.param->name,
                          "'), or with read_shard()");
      break;
    case Quantity::Master:
      break;  // Unit::read_master: not always a buffer
    case Quantity::Gradient:
      if (!external_grads_.empty()) {
        for (size_t i = 0; i < units_.size(); ++i) {
          if (units_[i].get() == &unit) return external_grads_[i];
        }
      }
      return unit.owned_grads();
    case Quantity::State0:
      return unit.states[0];
    case Quantity::State1:
      return unit.states[1];
  }
  return {};
}

// Contributions of this rank that no collective has seen (no_sync, stages 0 and 1 before the boundary).
bool ShardedModel::reads_local_gradient(const Slot& slot) const {
  return slot.unit->grad_state() == GradState::Accumulating && slot.param->filled;
}

shard::Range ShardedModel::local_range(int index) const {
  return local_range_of(slots_[index]);
}

shard::Range ShardedModel::local_range_of(const Slot& slot) const {
  const shard::Range mine = shard::intersect(slot.param->range, slot.unit->owned);
  if (mine.empty()) return {};
  return {mine.begin - slot.param->range.begin, mine.end - slot.param->range.begin};
}

std::vector<shard::NamedShard> ShardedModel::named_shards() const {
  std::vector<shard::NamedShard> shards;
  for (size_t i = 0; i < places_.size(); ++i) {
    const bool trained = i < slots_.size();
    const FlatParams& flat = *places_[i].flat;
    const FlatParams::Item& item = flat.items()[places_[i].item];
    const auto add = [&](Quantity what, shard::Range range, at::ScalarType dtype, bool cut) {
      if (range.empty() && item.range.size() > 0) return;
      shards.push_back({item.name, static_cast<int>(i), what, item.form, range, dtype,
                        cut ? ranks_.replicate->rank() : ranks_.rank(), trained});
    };
    const ParamPartition weight = flat.partition_of(places_[i].item);
    add(Quantity::Weight, weight.held, flat.dtype(), weight.partitioned);
    if (!trained) continue;
    const Unit& unit = *slots_[i].unit;
    const shard::Range owned = local_range_of(slots_[i]);
    const bool cut = placements_.states == shard::Placement::Shard && ranks_.shard->size() > 1;
    if (!unit.master_is_weight()) add(Quantity::Master, owned, at::kFloat, cut);
    const bool reduced = unit.grad_state() == GradState::Reduced && !unreduced_ && reducer_->replicas_agree();
    if (slots_[i].param->has_grad && reduced) add(Quantity::Gradient, owned, unit.grads.scalar_type(), cut);
    if (unit.states[0].defined()) add(Quantity::State0, owned, unit.states[0].scalar_type(), cut);
    if (unit.states[1].defined()) add(Quantity::State1, owned, unit.states[1].scalar_type(), cut);
  }
  return shards;
}

at::Tensor ShardedModel::read_shard(const shard::NamedShard& shard) {
  if (shard.quantity == Quantity::Weight) return partition_of(shard.param).values;
  const at::Tensor part = local_view(shard.param, shard.quantity);
  TESSERA_CHECK(part.defined() && part.numel() == shard.range.size(), "engine.read_shard", "parameter '", shard.name,
                "' has changed since named_shards() was called; call it again");
  return part.sizes() == shard.form.sizes ? shard::flatten_like_param(part, shard.form) : part;
}

at::Tensor ShardedModel::local_view(int index, Quantity what) {
  const Slot& slot = slots_[index];
  if (what == Quantity::Master) adopt_param(slot, /*compare=*/false);
  if (what == Quantity::Gradient && !slot.param->has_grad) return {};
  const bool replicated = placements_.states == shard::Placement::Replicate;
  const shard::Range r = slot.unit->owned_slice(*slot.param);
  at::Tensor part;
  if (what == Quantity::Master) {
    part = slot.unit->read_master(r);
  } else {
    const at::Tensor buffer = owned_buffer(slot, what);
    if (!buffer.defined()) return {};
    part = buffer.narrow(0, r.begin, r.size());
  }
  return replicated ? shard::view_as_param(part, {0, r.size()}, slot.param->form) : part;
}

void ShardedModel::set_local(int index, Quantity what, const at::Tensor& value) {
  const c10::AutoGradMode no_grad(false);
  const Slot& slot = slots_[index];
  const at::Tensor mine = local_view(index, what);
  TESSERA_CHECK_VALUE(mine.defined(), "engine.set_local", "there is nothing of this kind for parameter '",
                      slot.param->name, "' now");
  TESSERA_CHECK_VALUE(value.numel() == mine.numel(), "engine.set_local", "this rank holds ", mine.numel(),
                      " elements of parameter '", slot.param->name, "', the value has ", value.numel());
  if (what != Quantity::Master) {
    mine.copy_(value.view(mine.sizes()));
    return;
  }
  const bool replicated = placements_.states == shard::Placement::Replicate;
  const at::Tensor flat =
      replicated ? shard::flatten_like_param(value.view(mine.sizes()), slot.param->form) : value.flatten();
  shared_.readers_done("new masters");
  slot.unit->write_master(slot.unit->owned_slice(*slot.param), flat);
  shared_.written("new masters");
}

// The parameter's elements in the order of its memory, of which `part` is this rank's.
at::Tensor ShardedModel::gather_flat(const Slot& slot, const at::Tensor& part) {
  const Param& p = *slot.param;
  // Every element has one owner and -0.0 elsewhere: the sum is exact, also where the value is -0.0.
  at::Tensor full = at::full({p.range.size()}, -0.0, slot.unit->owned_weights().options().dtype(at::kFloat));
  const shard::Range mine = local_range_of(slot);
  full.narrow(0, mine.begin, mine.size()).copy_(part);
  const bool sharded = placements_.states == shard::Placement::Shard && ranks_.shard->size() > 1;
  if (sharded) ranks_.shard->all_reduce(full, comm::ReduceOp::Sum, "state of '" + p.name + "'").wait();
  return full;
}

at::Tensor ShardedModel::gather_full(int index, const at::Tensor& part) {
  const std::lock_guard lock(hooks_.mutex());
  const c10::AutoGradMode no_grad(false);
  const Slot& slot = slots_[index];
  const Param& p = *slot.param;
  const int64_t mine = local_range_of(slot).size();
  TESSERA_CHECK_VALUE(part.defined() && part.numel() == mine, "engine.gather_full", "this rank holds ", mine,
                      " elements of parameter '", p.name, "', the part has ", part.defined() ? part.numel() : 0);
  const bool shaped = part.sizes() == p.tensor.sizes();
  return shard::view_as_param(gather_flat(slot, shaped ? shard::flatten_like_param(part, p.form) : part.flatten()),
                              {0, p.range.size()}, p.form);
}

at::Tensor ShardedModel::local_part(int index, const at::Tensor& full) {
  const Slot& slot = slots_[index];
  const Param& p = *slot.param;
  TESSERA_CHECK_VALUE(full.defined() && full.sizes() == p.tensor.sizes(), "engine.local_part", "parameter '", p.name,
                      "' has shape ", p.tensor.sizes(), ", the value ",
                      full.defined() ? full.sizes() : at::IntArrayRef{});
  if (placements_.states == shard::Placement::Replicate) return full;
  const shard::Range mine = local_range_of(slot);
  return shard::flatten_like_param(full, p.form).narrow(0, mine.begin, mine.size());
}

double ShardedModel::agree_max(double value) {
  if (ranks_.size() == 1) return value;
  at::Tensor all = at::full({1}, value, at::kDouble);
  ranks_.agree(all, comm::ReduceOp::Max, "agreement");
  return all.item<double>();
}

at::Tensor ShardedModel::get_full(int index, Quantity what) {
  const std::lock_guard lock(hooks_.mutex());
  const c10::AutoGradMode no_grad(false);
  const Slot& slot = slots_[index];
  const Param& p = *slot.param;
  if (what == Quantity::Master) adopt_param(slot, /*compare=*/false);
  if (what == Quantity::Gradient && unreduced_) {  // on all ranks alike: nothing collective may follow
    if (!reads_local_gradient(slot)) return {};
    return shard::view_as_param(slot.unit->partial, p.range, p.form).to(at::kFloat, false, /*copy=*/true);
  }
  if (what == Quantity::Gradient) {
    const double seen = agree_max(reducer_->has_late() ? 2 : (p.has_grad ? 1 : 0));
    if (seen == 0) return {};
    if (seen == 2) {
      reducer_->reduce_late();
      return get_full(index, what);
    }
  }
  const shard::Range source = slot.unit->owned_slice(p);
  const at::Tensor buffer = what == Quantity::Master ? slot.unit->owned_weights() : owned_buffer(slot, what);
  if (!buffer.defined()) return {};
  const at::Tensor full = gather_flat(
      slot, what == Quantity::Master ? slot.unit->read_master(source) : buffer.narrow(0, source.begin, source.size()));
  if (what == Quantity::Gradient && !reducer_->replicas_agree()) {
    const auto op = options_.average ? comm::ReduceOp::Avg : comm::ReduceOp::Sum;
    ranks_.replicate->all_reduce(full, op, "gradient of '" + p.name + "'").wait();
  }
  return shard::view_as_param(full, {0, p.range.size()}, p.form);
}

// The user sets gradients where no backward ran: what they do not set is zero.
void ShardedModel::settle_empty_units() {
  for (const auto& unit : units_) {
    if (unit->grad_state() != GradState::Empty) continue;
    unit->grads.zero_();
    unit->move_to(GradState::Reduced);
    unit->reduced = true;
  }
  flushed_ = true;
}

void ShardedModel::set_full(int index, Quantity what, const at::Tensor& value) {
  const std::lock_guard lock(hooks_.mutex());
  const c10::AutoGradMode no_grad(false);
  const Slot& slot = slots_[index];
  Param& p = *slot.param;
  TESSERA_CHECK_VALUE(value.defined() && value.sizes() == p.tensor.sizes(), "engine.set_full", "parameter '", p.name,
                      "' has shape ", p.tensor.sizes(), ", the value ",
                      value.defined() ? value.sizes() : at::IntArrayRef{});
  if (what == Quantity::Master) adopt_param(slot, /*compare=*/false);
  if (what == Quantity::Gradient) {
    if (reads_local_gradient(slot)) {
      shard::view_as_param(slot.unit->partial, p.range, p.form).copy_(value);
      return;
    }
    if (slot.unit->grad_state() == GradState::Empty) {
      settle_empty_units();
    }
    reduce_replicas();
    p.has_grad = p.filled = true;
    if (slot.unit->grads_are_visible()) {
      p.tensor.mutable_grad() = shard::view_as_param(slot.unit->grads, p.range, p.form);
    }
  }
  const shard::Range mine = local_range(index);
  const shard::Range target = slot.unit->owned_slice(p);
  const at::Tensor values = shard::flatten_like_param(value, p.form).narrow(0, mine.begin, mine.size());
  if (what == Quantity::Master) {
    shared_.readers_done("new masters");
    slot.unit->write_master(target, values);
    shared_.written("new masters");
    return;
  }
  const at::Tensor buffer = owned_buffer(slot, what);
  TESSERA_CHECK_VALUE(buffer.defined(), "engine.set_full", "parameter '", p.name, "' has no such state");
  buffer.narrow(0, target.begin, target.size()).copy_(values);
}

}  // namespace tessera::zero

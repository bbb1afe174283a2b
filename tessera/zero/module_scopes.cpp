// ShardedModel: partitioned parameters around modules and in regions.
#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/zero/sharded_model.h"

namespace tessera::zero {

// ---------------------------------------------------------------- scopes

int ShardedModel::add_scope(const std::vector<int>& slots) {
  std::vector<int> units;
  units.reserve(slots.size());
  for (const int slot : slots)
    units.push_back(places_[slot].unit);
  return unsharder_->add_scope(std::move(units));
}

void ShardedModel::check_scope(int scope) const {
  TESSERA_CHECK_VALUE(unsharder_->has_scope(scope), "engine", "there is no module number ", scope,
                      "; use what add_module() returned");
}

void ShardedModel::extend_scope(int scope, int slot) {
  check_scope(scope);
  const std::lock_guard lock(hooks_.mutex());
  unsharder_->extend_scope(scope, places_[slot].unit, Hooks::inside_task());
}

void ShardedModel::use_elsewhere(int slot) {
  const std::lock_guard lock(hooks_.mutex());
  const int scope = unsharder_->holding_scope();
  TESSERA_CHECK(scope >= 0, "zero", "parameter '", places_[slot].flat->items()[places_[slot].item].name,
                "' is partitioned and no module of the engine is running; use GatheredParameters");
  unsharder_->extend_scope(scope, places_[slot].unit, Hooks::inside_task());
}

bool ShardedModel::enter_scope(int scope) {
  check_scope(scope);
  const std::lock_guard lock(hooks_.mutex());
  const bool outer = unsharder_->enter(scope, Hooks::inside_task());
  producers_.resize(unsharder_->depth());
  return outer;
}

void ShardedModel::note_inputs(const std::vector<at::Tensor>& inputs) {
  const std::lock_guard lock(hooks_.mutex());
  if (!producers_.empty()) producers_.back() = Hooks::producers_of(inputs);
}

void ShardedModel::watch_call_of(std::vector<int> units, const std::vector<at::Tensor>& outputs,
                                 const std::vector<compat::NodePtr>& producers, bool open_now) {
  if (units.empty()) return;
  const auto call = std::make_shared<ScopeCall>();
  call->units = std::move(units);
  call->outer = unsharder_->had_inner_calls();
  if (!hooks_.watch_call(call, outputs, producers)) return;
  unsharder_->call_made(*call);
  if (open_now) unsharder_->call_opened(*call, /*again=*/false);
}

void ShardedModel::leave_scope(int scope, const std::vector<at::Tensor>& outputs) {
  check_scope(scope);
  const std::lock_guard lock(hooks_.mutex());
  const bool in_backward = Hooks::inside_task();
  unsharder_->end_inner(scope, in_backward);
  producers_.resize(unsharder_->depth());
  const std::vector<int> units = unsharder_->watched(scope);
  const auto recorded = [](const at::Tensor& t) { return static_cast<bool>(Hooks::maker_of(t)); };
  const bool any = c10::GradMode::is_enabled() && std::any_of(outputs.begin(), outputs.end(), recorded);
  std::vector<compat::NodePtr> producers;
  if (!units.empty()) producers = std::move(producers_.back());
  if (any) {
    // What a recomputation gathered is needed at once by the backward of the same nodes. Frozen units have no gradient
    // that would tell when they are done with, so they are gathered again when their backward comes.
    std::vector<int> now, later;
    for (const int unit : units)
      (in_backward && unit_of_number_[unit] != nullptr ? now : later).push_back(unit);
    watch_call_of(std::move(now), outputs, producers, /*open_now=*/true);
    watch_call_of(std::move(later), outputs, producers, /*open_now=*/false);
  }
  unsharder_->leave(scope, in_backward, any);
  producers_.resize(unsharder_->depth());
}

void ShardedModel::abort_scope(int scope) {
  check_scope(scope);
  const std::lock_guard lock(hooks_.mutex());
  unsharder_->abort(scope, Hooks::inside_task());
  producers_.resize(unsharder_->depth());
}

void ShardedModel::end_stray_scopes() {
  const std::lock_guard lock(hooks_.mutex());
  if (!unsharder_->inside_scope() || Hooks::inside_task()) return;
  unsharder_->abort_all();
  producers_.clear();
}

void ShardedModel::call_opened(ScopeCall& call, bool again) {
  unsharder_->call_opened(call, again);
}

void ShardedModel::call_closed(ScopeCall& call) {
  for (const int number : unsharder_->call_closed(call)) {
    Unit* unit = unit_of_number_[number];
    if (unit != nullptr && !hooks_.in_forward_task()) reducer_->over(*unit, may_reduce());
  }
}

void ShardedModel::call_gone(ScopeCall& call) {
  try {
    unsharder_->call_gone(call);
  } catch (const std::exception&) {
    // A lost peer: the next collective says so.
  }
}

void ShardedModel::tasks_ended() {
  try {
    unsharder_->end_backward();
  } catch (const std::exception&) {
    // As above; and this may run while another exception passes.
  }
}

// ---------------------------------------------------------------- regions

bool ShardedModel::is_gathered(int slot) const {
  return places_[slot].flat->state() == ParamState::Ready;
}

ParamPartition ShardedModel::partition_of(int slot) const {
  return places_[slot].flat->partition_of(places_[slot].item);
}

void ShardedModel::open_region(const std::vector<int>& slots, bool writable) {
  const std::lock_guard lock(hooks_.mutex());
  for (const int slot : slots) {
    TESSERA_CHECK(!places_[slot].open, "zero.GatheredParameters", "parameter '",
                  places_[slot].flat->items()[places_[slot].item].name,
                  "' is in an open GatheredParameters region already; regions must not overlap");
  }
  size_t done = 0;
  try {
    for (; done < slots.size(); ++done)
      unsharder_->hold(places_[slots[done]].unit, writable);
  } catch (...) {
    while (done > 0)
      unsharder_->unhold(places_[slots[--done]].unit);
    throw;
  }
  for (const int slot : slots) {
    Place& place = places_[slot];
    place.open = true;
    place.writable = writable;
    if (place.flat->sharded()) continue;
    if (writable && place.flat->shares()) place.flat->lend(place.item);
    place.flat->mark(place.item);  // updates write to it too
    const Unit* unit = unit_of_number_[place.unit];
    if (unit != nullptr && unit->residual.defined()) place.before = unit->owned_values(place.item).clone();
  }
}

// Not every write can be seen (p.data.copy_() leaves no trace), so all parameters of the region are taken; masters that
// still round to the parameter's values keep their bits.
void ShardedModel::take_writes(const std::vector<int>& slots, Writes writes, int writer) {
  const c10::AutoGradMode no_grad(false);
  for (const int slot : slots) {
    TESSERA_CHECK(places_[slot].writable, "zero.GatheredParameters", "parameter '",
                  places_[slot].flat->items()[places_[slot].item].name,
                  "' was gathered for reading only; gather it for writing where a rank's values shall hold");
  }
  if (writes == Writes::FromRank) {
    for (const int slot : slots) {
      const Place& place = places_[slot];
      ranks_.broadcast(place.flat->values(place.item), writer,
                       "new values of '" + place.flat->items()[place.item].name + "'");
    }
  }
  shared_.readers_done("the writes of a region");
  for (const int slot : slots) {
    const Place& place = places_[slot];
    Unit* unit = unit_of_number_[place.unit];
    const bool split = unit != nullptr && unit->residual.defined();
    const bool apart = place.flat->sharded() || place.flat->is_lent(place.item);
    const at::Tensor before = split && apart ? unit->owned_values(place.item).clone() : place.before;
    place.flat->keep_write(place.item);
    if (unit == nullptr || unit->master_is_weight()) continue;
    Param& param = unit->params[place.item];
    const bool changed = split ? !unit->owned_values(place.item).equal(before) : unit->differs_from_master(param);
    if (changed) unit->set_master_from(param, place.flat->view(place.item));
    param.version = param.tensor._version();
  }
  shared_.written("the writes of a region");
}

void ShardedModel::close_region(const std::vector<int>& slots, Writes writes, int writer) {
  const std::lock_guard lock(hooks_.mutex());
  std::exception_ptr failure;
  try {
    if (writes != Writes::None) take_writes(slots, writes, writer);
  } catch (...) {
    failure = std::current_exception();
  }
  for (const int slot : slots) {
    Place& place = places_[slot];
    place.open = false;
    place.before.reset();
    if (!place.flat->sharded()) place.flat->give_back(place.item);
    try {
      unsharder_->unhold(places_[slot].unit);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera::zero

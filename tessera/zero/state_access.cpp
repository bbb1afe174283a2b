#include "tessera/zero/state_access.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/adoption.h"

namespace tessera::zero {

namespace {

const shard::Buffer& state_of(const Unit& unit, Quantity what) {
  return unit.states()[what == Quantity::State0 ? 0 : 1];
}

// A guard of work on states that may live on a disk.
RankGuard guard_of(const Unit& unit) {
  return RankGuard(!states_on_device(unit));
}

// An error of one rank's disk is one of all ranks that hold the parameter.
void agree_on(const RankGuard& disks, const Place& place, const char* caller) {
  if (!disks.agrees()) return;
  disks.agree(place.unit->ranks())
      .check(c10::str("[engine] ", caller, "() of the state of parameter '", place.name(), "': "));
}

}  // namespace

StateAccess::StateAccess(Units& units, BackwardDriver& driver) : units_(units), driver_(driver) {}

at::Tensor StateAccess::read_owned(const Place& place, Quantity what) const {
  return read_owned(place, what, place.unit->owned_slice(*place.param));
}

// Reads `r` of the unit's owned range, within a trained parameter; undefined where there is nothing. A view where it lives on
// the device. A backward that updates and threw has left work on the streams of its hooks.
at::Tensor StateAccess::read_owned(const Place& place, Quantity what, shard::Range r) const {
  place.unit->on_this_stream();
  const Unit& unit = *place.unit;
  switch (what) {
    case Quantity::Weight:
      TESSERA_CHECK_VALUE(false, "engine", "weights are read and written through the parameter ('", place.param->name,
                          "'), or with read_shard()");
      break;
    case Quantity::Master:
      return unit.read_master(r);
    case Quantity::Gradient:
      if (unit.client_grads().defined()) return unit.client_grads().narrow(0, r.begin, r.size());
      return read_gradient(place, r);
    case Quantity::State0:
    case Quantity::State1:
      if (const shard::Buffer& state = state_of(unit, what); state.defined()) return state.read(r);
  }
  return {};
}

// Where a gradient in pieces has none it is zero: another slice of the model may have one.
at::Tensor StateAccess::read_gradient(const Place& place, shard::Range r) const {
  const Unit& unit = *place.unit;
  if (units_.options().update_in_backward) return {};
  if (!unit.in_pieces() && !unit.grads().has_memory()) return {};
  const auto [buffer, there] = unit.gradient(*place.param, r);
  return buffer.has_memory() ? buffer.read(there) : at::zeros({r.size()}, unit.grad_options());
}

bool StateAccess::is_there(const Place& place, Quantity what) const {
  if (what == Quantity::Gradient) return place.param->grad.has();
  return what == Quantity::Master || state_of(*place.unit, what).defined();
}

void StateAccess::write_owned(const Place& place, Quantity what, const at::Tensor& values, RankGuard& disks) {
  Unit& unit = *place.unit;
  unit.on_this_stream();
  const shard::Range r = unit.owned_slice(*place.param);
  switch (what) {
    case Quantity::Master:
      units_.shared().readers_done("new masters");
      disks.run([&] {
        unit.write_master(r, values);
        unit.masters_lead(*place.param);
        unit.note_weights(*place.param);
        unit.flush();
      });
      units_.shared().written("new masters");
      break;
    case Quantity::State0:
    case Quantity::State1:
      disks.run([&] {
        state_of(unit, what).write(r, values);
        unit.flush();
      });
      break;
    default:
      if (unit.client_grads().defined()) {
        read_owned(place, what).copy_(values);
      } else {
        const auto [buffer, there] = unit.gradient(*place.param, r);
        buffer.write(there, values);
      }
  }
}

std::vector<shard::NamedShard> StateAccess::named_shards() const {
  driver_.adopt_grads();
  std::vector<shard::NamedShard> shards;
  for (ParamId id = 0; id < units_.count(); ++id)
    add_shards(id, shards);
  return shards;
}

// `cut`: over the ranks of the shard group; otherwise all of them have the same.
shard::NamedShard StateAccess::shard_of(ParamId id, Quantity what, shard::Range range, at::ScalarType dtype,
                                        bool cut) const {
  const ParamSpec& param = units_.params()[id];
  const Ranks& ranks = units_.ranks_of(id);
  const int slices = ranks.varies_along_model ? 1 : ranks.model->size();
  const int copy = cut ? ranks.replicate->rank() : ranks.rank();
  const int copies = cut ? ranks.replicate->size() : ranks.size();
  const int replica = copy * slices + (slices == 1 ? 0 : ranks.model->rank());
  return {param.name, id, what, form(id), range, dtype, replica, copies * slices, units_[id].trained(), param.cut};
}

shard::NamedShard StateAccess::owned_shard(ParamId param) const {
  const Place& place = units_.trained(param, "owned_shard");
  return shard_of(param, Quantity::Master, units_.local_range(place), at::kFloat,
                  units_.states_are_cut(place.unit->ranks()));
}

void StateAccess::add_shards(ParamId id, std::vector<shard::NamedShard>& shards) const {
  const Place& place = units_[id];
  const at::Tensor& tensor = units_.params()[id].tensor;
  const auto add = [&](Quantity what, shard::Range range, at::ScalarType dtype, bool cut) {
    if (!range.empty() || tensor.numel() == 0) shards.push_back(shard_of(id, what, range, dtype, cut));
  };
  if (!place.held()) return add(Quantity::Weight, {0, tensor.numel()}, tensor.scalar_type(), false);
  const ParamPartition weight = place.flat->partition_of(place.item);
  add(Quantity::Weight, weight.held, place.flat->dtype(), weight.partitioned);
  if (!place.trained()) return;
  const Unit& unit = *place.unit;
  const shard::Range owned = units_.local_range(place);
  const bool cut = units_.states_are_cut(unit.ranks());
  if (!unit.master_is_weight()) add(Quantity::Master, owned, at::kFloat, cut);
  const bool reduced =
      unit.progress().state() == GradState::Reduced && !driver_.unreduced() && driver_.reducer().replicas_agree();
  if (place.param->grad.has() && reduced)
    add(Quantity::Gradient, owned, unit.grad_options().dtype().toScalarType(), cut);
  if (unit.states()[0].defined()) add(Quantity::State0, owned, unit.states()[0].dtype(), cut);
  if (unit.states()[1].defined()) add(Quantity::State1, owned, unit.states()[1].dtype(), cut);
}

at::Tensor StateAccess::read_shard(const shard::NamedShard& shard, shard::Range part) {
  const int64_t begin = part.begin - shard.range.begin;
  if (shard.quantity == Quantity::Weight) return read_weight(shard.param, part);
  const Place& place = units_.trained(shard.param, "read_shard");
  if (shard.quantity == Quantity::Master) adopt_param(place, /*compare=*/false);
  const shard::Range owned = place.unit->owned_slice(*place.param);
  TESSERA_CHECK(is_there(place, shard.quantity) && owned.size() == shard.range.size(), "engine.read_shard",
                "parameter '", shard.name, "' has changed since named_shards() was called; call it again");
  return read_owned(place, shard.quantity, {owned.begin + begin, owned.begin + begin + part.size()});
}

at::Tensor StateAccess::read_weight(ParamId param, shard::Range part) const {
  const Place& place = units_.at(param, "read_shard");
  if (place.held()) return place.flat->read(place.item, part);
  const at::Tensor& tensor = units_.params()[param].tensor;
  return shard::flatten_like_param(tensor.detach(), tensor).narrow(0, part.begin, part.size());
}

shard::Form StateAccess::form(ParamId param) const {
  const Place& place = units_.at(param, "form");
  return place.held() ? place.flat->items()[place.item].form : shard::Form(units_.params()[param].tensor);
}

void StateAccess::begin_writes() {
  adopt_params(units_, /*compare=*/false);  // or a user's edit from before would be taken over what is written
  units_.shared().readers_done("values that are loaded");
}

shard::Range StateAccess::writable(ParamId param, Quantity what) const {
  const Place& place = units_.at(param, "writable");
  if (place.trained()) return units_.local_range(place);
  TESSERA_CHECK_VALUE(what == Quantity::Weight, "engine", "parameter '", units_.params()[param].name,
                      "' is not optimized: it has a weight only");
  return place.held() ? place.flat->partition_of(place.item).held
                      : shard::Range{0, units_.params()[param].tensor.numel()};
}

void StateAccess::write(ParamId param, Quantity what, shard::Range range, const at::Tensor& values) {
  const c10::AutoGradMode no_grad(false);
  const Place& place = units_.at(param, "write");
  const shard::Range mine = writable(param, what);
  TESSERA_CHECK_VALUE(mine.begin <= range.begin && range.end <= mine.end && values.numel() == range.size(), "engine",
                      "elements [", range.begin, ", ", range.end, ") of parameter '", units_.params()[param].name,
                      "' are not what this rank holds, or the value has ", values.numel());
  if (!place.held()) {
    const at::Tensor& tensor = units_.params()[param].tensor;
    const at::Tensor own = shard::flatten_like_param(tensor.detach(), tensor);
    own.narrow(0, range.begin, range.size()).copy_(values);
    if (!own.is_alias_of(tensor)) tensor.detach().copy_(own.view(tensor.sizes()));
    return;
  }
  if (!place.trained()) return place.flat->write(place.item, range, values);
  Unit& unit = *place.unit;
  unit.on_this_stream();
  const shard::Range there = in_owned(place, range);
  if (what == Quantity::Master) {
    unit.masters_lead(*place.param);
    return unit.write_master(there, values);
  }
  TESSERA_CHECK_VALUE(what == Quantity::State0 || what == Quantity::State1, "engine", "no such value can be written");
  const shard::Buffer& state = state_of(unit, what);
  TESSERA_CHECK_VALUE(state.defined(), "engine", "parameter '", place.name(), "' has no such state");
  state.write(there, values);
}

// Elements of the parameter as elements of its unit's owned range.
shard::Range StateAccess::in_owned(const Place& place, shard::Range range) const {
  const int64_t shift = place.unit->owned_slice(*place.param).begin - units_.local_range(place).begin;
  return {range.begin + shift, range.end + shift};
}

at::Tensor StateAccess::writable_view(ParamId param, Quantity what, shard::Range range) const {
  const Place& place = units_.at(param, "writable_view");
  if (!place.trained()) return {};
  place.unit->on_this_stream();
  Unit& unit = *place.unit;
  const shard::Range there = in_owned(place, range);
  const bool is_weight = what == Quantity::Master && unit.master_is_weight();
  if (what == Quantity::Master && !is_weight) unit.masters_lead(*place.param);
  const shard::Buffer buffer = is_weight                  ? unit.weights()
                               : what == Quantity::Master ? unit.master()
                                                          : state_of(unit, what);
  return buffer.defined() && buffer.is_here() ? buffer.view(there) : at::Tensor();
}

void StateAccess::flush() {
  for (const auto& unit : units_.all())
    unit->flush();
  for (const auto& flat : units_.frozen())
    flat->flush();
}

void StateAccess::reset(ParamId param, Quantity what) {
  const Place& place = units_.trained(param, "reset");
  TESSERA_CHECK_VALUE(state_of(*place.unit, what).defined(), "engine", "parameter '", place.name(),
                      "' has no such state");
  const double value = optim::initial_state(units_.rule(), units_.groups()[place.param->group]);
  place.unit->on_this_stream();
  place.unit->fill_state(what == Quantity::State0 ? 0 : 1, *place.param, value);
}

void StateAccess::end_writes() {
  units_.shared().written("values that are loaded");
}

void StateAccess::check_trained(ParamId param, const char* call) const {
  static_cast<void>(units_.trained(param, call));
}

std::pair<int64_t, int64_t> StateAccess::local_range(ParamId param) const {
  const shard::Range range = units_.local_range(units_.trained(param, "local_range"));
  return {range.begin, range.end};
}

int64_t StateAccess::param_step(ParamId param) const {
  return units_.trained(param, "param_step").param->step;
}

void StateAccess::set_param_step(ParamId param, int64_t step) {
  TESSERA_CHECK_VALUE(step >= 0, "state", "'step' is a number of updates, a whole one from 0 on, not ", step);
  const Place& place = units_.trained(param, "set_param_step");
  place.unit->set_step(*place.param, step);
}

std::optional<int64_t> StateAccess::unwritten(ParamId param) const {
  const Place& place = units_[param];
  if (!place.trained() || !place.param->known.defined()) return {};
  return place.param->unwritten;
}

void StateAccess::set_unwritten(ParamId param, std::optional<int64_t> updates) {
  const Place& place = units_[param];
  if (place.trained()) place.unit->follow(*place.param, updates);
}

// Adopts what a user wrote to p.data or p.grad, where they could.
void StateAccess::adopt(const Place& place, Quantity what) {
  if (what == Quantity::Master) adopt_param(place, /*compare=*/true);
  if (what == Quantity::Gradient) driver_.adopt_grad(place);
}

at::Tensor StateAccess::local_view(ParamId param, Quantity what) {
  const Place& place = units_.trained(param, "local_view");
  adopt(place, what);
  if (what == Quantity::Gradient && !place.param->grad.has()) return {};
  const bool replicated = units_.placements().states == shard::Placement::Replicate;
  const at::Tensor part = read_owned(place, what);
  if (!part.defined()) return {};
  return replicated ? shard::view_as_param(part, {0, part.numel()}, place.param->form) : part;
}

void StateAccess::set_local(ParamId param, Quantity what, const at::Tensor& value) {
  const c10::AutoGradMode no_grad(false);
  const Place& place = units_.trained(param, "set_local");
  TESSERA_CHECK_VALUE(what != Quantity::Weight, "engine.set_local", "weights are written through the parameter ('",
                      place.param->name, "')");
  adopt(place, what);
  TESSERA_CHECK_VALUE(is_there(place, what), "engine.set_local", "there is nothing of this kind for parameter '",
                      place.param->name, "' now");
  const int64_t mine = place.unit->owned_slice(*place.param).size();
  TESSERA_CHECK_VALUE(value.numel() == mine, "engine.set_local", "this rank holds ", mine, " elements of parameter '",
                      place.param->name, "', the value has ", value.numel());
  const bool replicated = units_.placements().states == shard::Placement::Replicate;
  const shard::Form& form = place.param->form;
  RankGuard disks(/*agrees=*/false);
  write_owned(place, what, replicated ? shard::flatten_like_param(value.view(form.sizes), form) : value.flatten(),
              disks);
}

// The parameter's elements in the order of its memory, of which `part` is this rank's.
at::Tensor StateAccess::gather_flat(const Place& place, const at::Tensor& part) {
  const Param& p = *place.param;
  // Every element has one owner and -0.0 elsewhere: the sum is exact, also where the value is -0.0.
  at::Tensor full = at::full({p.range.size()}, -0.0, place.flat->options().dtype(at::kFloat));
  const shard::Range mine = units_.local_range(place);
  full.narrow(0, mine.begin, mine.size()).copy_(part);
  if (units_.states_are_cut(place.unit->ranks()))
    place.unit->ranks().shard->all_reduce(full, comm::ReduceOp::Sum, "state of '" + p.name + "'").wait();
  return full;
}

// Turns the parameter's elements, in the order of its memory, into values as users see them: in its shape, or in the shape of
// the whole that it is a slice of.
at::Tensor StateAccess::whole_of(const Place& place, const at::Tensor& flat) const {
  const Param& p = *place.param;
  if (p.cut == nullptr) return shard::view_as_param(flat, {0, p.range.size()}, p.form);
  // Elements that several slices hold are the same in all of them: the largest of all is exact. Integers are reduced, whose order
  // every back end knows, as it does not with NaN.
  TESSERA_ASSERT(flat.scalar_type() == at::kFloat);
  at::Tensor bits = at::full({p.cut->numel()}, std::numeric_limits<int32_t>::min(), flat.options().dtype(at::kInt));
  const at::Tensor whole = bits.view(at::kFloat);
  shard::for_stretches(p.cut, {0, flat.numel()}, [&](shard::Range piece, int64_t number) {
    whole.narrow(0, number, piece.size()).copy_(flat.narrow(0, piece.begin, piece.size()));
  });
  place.unit->ranks().model->all_reduce(bits, comm::ReduceOp::Max, "whole of '" + p.name + "'").wait();
  return whole.view(p.cut->sizes);
}

// Turns such values into the parameter's elements. Value error for another shape.
at::Tensor StateAccess::flat_of(const Place& place, const at::Tensor& whole, const char* caller) const {
  const Param& p = *place.param;
  const at::IntArrayRef sizes = p.cut ? at::IntArrayRef(p.cut->sizes) : p.tensor.sizes();
  if (!whole.defined() || whole.sizes() != sizes)
    TESSERA_FAIL(::c10::ValueError, "[", caller, "] parameter '", p.name, "' has shape ", sizes, ", the value ",
                 whole.defined() ? whole.sizes() : at::IntArrayRef{});
  if (p.cut == nullptr) return shard::flatten_like_param(whole, p.form);
  const at::Tensor all = whole.contiguous().view(-1);
  at::Tensor flat = at::empty({p.range.size()}, whole.options());
  shard::for_stretches(p.cut, {0, flat.numel()}, [&](shard::Range piece, int64_t number) {
    flat.narrow(0, piece.begin, piece.size()).copy_(all.narrow(0, number, piece.size()));
  });
  return flat;
}

at::Tensor StateAccess::gather_full(ParamId param, const at::Tensor& part) try {
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  const Place& place = units_.trained(param, "gather_full");
  const Param& p = *place.param;
  const int64_t mine = units_.local_range(place).size();
  TESSERA_CHECK_VALUE(part.defined() && part.numel() == mine, "engine.gather_full", "this rank holds ", mine,
                      " elements of parameter '", p.name, "', the part has ", part.defined() ? part.numel() : 0);
  const bool shaped = part.sizes() == p.tensor.sizes();
  return whole_of(place, gather_flat(place, shaped ? shard::flatten_like_param(part, p.form) : part.flatten()));
} catch (c10::OutOfMemoryError& error) {
  fail_alone(error, param);
}

at::Tensor StateAccess::local_part(ParamId param, const at::Tensor& full) {
  const Place& place = units_.trained(param, "local_part");
  const Param& p = *place.param;
  const at::Tensor flat = flat_of(place, full, "engine.local_part");
  if (units_.placements().states == shard::Placement::Replicate) return p.cut ? flat.view(p.tensor.sizes()) : full;
  const shard::Range mine = units_.local_range(place);
  return flat.narrow(0, mine.begin, mine.size());
}

double StateAccess::agree_max(double value) {
  if (units_.ranks().all() == 1) return value;
  at::Tensor all = at::full({1}, value, at::kDouble);
  units_.ranks().agree(all, comm::ReduceOp::Max, "agreement");
  return all.item<double>();
}

// Returns this rank's gradient before its reduction; that it is not reduced yet holds on all ranks alike. Ranks differ in whether
// they have one: nothing collective may follow, other than among the slices of one parameter.
at::Tensor StateAccess::local_gradient(const Place& place) const {
  const Param& p = *place.param;
  const bool here = BackwardDriver::reads_local_gradient(place);
  if (p.cut) {
    const at::Tensor any = at::full({1}, here ? 1 : 0, p.tensor.options().dtype(at::kFloat).requires_grad(false));
    place.unit->ranks().model->all_reduce(any, comm::ReduceOp::Max, "gradient of '" + p.name + "'").wait();
    if (any.item<float>() == 0) return {};
  } else if (!here) {
    return {};
  }
  at::Tensor mine = at::zeros({p.range.size()}, p.tensor.options().dtype(at::kFloat).requires_grad(false));
  if (here) mine.copy_(place.unit->contribution(p));
  return whole_of(place, mine);
}

at::Tensor StateAccess::get_full(ParamId param, Quantity what) try {
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  const Place& place = units_.trained(param, "get_full");
  const Param& p = *place.param;
  if (what == Quantity::Gradient) driver_.adopt_grad(place);
  if (what == Quantity::Gradient && driver_.unreduced()) return local_gradient(place);
  if (what == Quantity::Gradient) {
    const double seen = agree_max(driver_.reducer().has_late() ? 2 : (p.grad.has() ? 1 : 0));
    if (seen == 0) return {};
    if (seen == 2) {
      driver_.reducer().reduce_late();
      return get_full(param, what);
    }
  }
  RankGuard disks = guard_of(*place.unit);
  at::Tensor mine;
  disks.run([&] {
    if (what == Quantity::Master) adopt_param(place, /*compare=*/true);
    mine = read_owned(place, what);
  });
  agree_on(disks, place, "get_full");
  if (!mine.defined()) return {};
  const at::Tensor full = gather_flat(place, mine);
  if (what == Quantity::Gradient)
    driver_.reducer().reduce_replicas_of(*place.unit, full, "gradient of '" + p.name + "'");
  return whole_of(place, full);
} catch (c10::OutOfMemoryError& error) {
  fail_alone(error, param);
}

void StateAccess::fail_alone(c10::OutOfMemoryError& error, ParamId param) const {
  error.add_context(c10::str("[zero] no memory for whole values of parameter '", units_.params()[param].name, "'"));
  units_.fail_alone(error);
}

void StateAccess::complete_gradient(ParamId param) {
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  const Place& place = units_.trained(param, "complete_gradient");
  if (!place.param->grad.has()) driver_.have_gradient(place);
}

void StateAccess::set_full(ParamId param, Quantity what, const at::Tensor& value) try {
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  const Place& place = units_.trained(param, "set_full");
  set_flat(place, what, flat_of(place, value, "engine.set_full"));
} catch (c10::OutOfMemoryError& error) {
  fail_alone(error, param);
}

bool StateAccess::set_unrounded(ParamId param, const at::Tensor& value) try {
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  const Place& place = units_.at(param, "set_unrounded");
  if (!place.trained() || place.unit->master_is_weight() || value.scalar_type() == place.flat->dtype()) return false;
  const Param& p = *place.param;
  const bool is_slice = value.sizes() == p.tensor.sizes();
  set_flat(
      place, Quantity::Master,
      is_slice ? shard::flatten_like_param(value.detach(), p.form) : flat_of(place, value, "engine.set_unrounded"));
  return true;
} catch (c10::OutOfMemoryError& error) {
  fail_alone(error, param);
}

// The parameter's elements in the order of its memory get `flat`, where this rank has them.
void StateAccess::set_flat(const Place& place, Quantity what, const at::Tensor& flat) {
  const Param& p = *place.param;
  RankGuard disks = guard_of(*place.unit);
  disks.run([&] {
    if (what == Quantity::Master) adopt_param(place, /*compare=*/true);
  });
  if (what == Quantity::Gradient) {
    TESSERA_CHECK(!units_.options().update_in_backward, "engine.set_full",
                  "tessera.update_in_backward keeps no gradients that could be set");
    driver_.adopt_grad(place);
    if (BackwardDriver::reads_local_gradient(place)) {
      place.unit->contribution(p).copy_(flat);
      return;
    }
    driver_.reduce_replicas();
    driver_.have_gradient(place);
  }
  const shard::Range mine = units_.local_range(place);
  TESSERA_CHECK_VALUE(what != Quantity::Weight && is_there(place, what), "engine.set_full", "parameter '", p.name,
                      "' has no such state");
  write_owned(place, what, flat.narrow(0, mine.begin, mine.size()), disks);
  agree_on(disks, place, "set_full");
}

}  // namespace tessera::zero

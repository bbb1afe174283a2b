#include "tessera/zero/backward_driver.h"

#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/adoption.h"
#include "tessera/zero/update_lane.h"

namespace tessera::zero {

namespace {
// A checksum: the same for the same bits, in whatever order they are added up.
int64_t words_of(const at::Tensor& flat) {
  const at::Tensor bits = flat.to(at::kFloat).view(at::kInt);
  return at::sum(bits, at::kLong).item<int64_t>();
}
}  // namespace

BackwardDriver::BackwardDriver(Units& units, std::function<StepState()> step)
    : units_(units), step_(std::move(step)), hooks_(*this, units.options().reader_lock) {
  std::vector<Unit*> order;
  order.reserve(units_.all().size());
  for (const auto& unit : units_.all())
    order.push_back(unit.get());
  reducer_ = std::make_unique<Reducer>(units_.ranks(), std::move(order), units_.options(), units_.phases());
  follow_params();
}

void BackwardDriver::follow_params() {
  for (const ParamId id : units_.trained_ids()) {
    const Place& place = units_[id];
    if (!place.flat->sharded() && !is_bound(*place.param, *place.unit)) {
      units_.lane().settle();
      adopt_param(place, /*compare=*/false);
    }
    watch(place.param->tensor, id);
  }
  follow_waiting();
}

void BackwardDriver::follow_waiting() {
  for (const ParamId id : waiting()) {
    const at::Tensor& tensor = units_.params()[id].tensor;
    units_.check_joins(units_.params()[id]);
    if (hooks_.watches(tensor)) continue;
    if (has_gradients()) {
      check_watched(id);
    } else {
      tensor.mutable_grad().reset();
    }
    watch(tensor, id);
  }
}

void BackwardDriver::watch(const at::Tensor& param, ParamId id) {
  if (param.requires_grad() && !hooks_.watches(param)) hooks_.watch(param, id);
}

std::vector<ParamId> BackwardDriver::waiting() const {
  std::vector<ParamId> ids;
  for (const ParamId id : units_.may_join()) {
    const at::Tensor& tensor = units_.params()[id].tensor;
    if (tensor.requires_grad() && (hooks_.watches(tensor) || !Hooks::is_watched(tensor))) ids.push_back(id);
  }
  return ids;
}

// Gradients that came past our hook (Note [Accumulators change]) were not scaled, not reduced and are not ours to guess.
void BackwardDriver::check_all_watched() {
  const std::lock_guard lock(hooks_.mutex());
  for (const ParamId id : waiting())
    check_watched(id);
  for (const ParamId id : units_.trained_ids()) {
    const Param& p = *units_[id].param;
    const at::Tensor& grad = p.tensor.grad();
    if (grad.defined()) check_shape(p, grad);
    // Stage 0: the conversion took along what was reduced.
    if (!grad.defined() || (units_[id].unit->grads_are_visible() && p.grad.has())) continue;
    TESSERA_CHECK(
        !p.tensor.requires_grad() || hooks_.watches(p.tensor), "zero", "parameter '", p.name,
        "' was converted (to() of a module) after a first register_hook() and got gradients past the engine: call the "
        "engine, not its module, for the first forward after that; engine.zero_grad() drops them");
    TESSERA_CHECK(
        !sink_->uses_up(), "engine.step", "parameter '", p.name,
        "' has a gradient that the program has put there, and tessera.update_in_backward has updated it in the "
        "backward: reset it, or switch update_in_backward off");
  }
}

void BackwardDriver::check_watched(ParamId id) const {
  const ParamSpec& spec = units_.params()[id];
  TESSERA_CHECK(
      !spec.tensor.grad().defined() || hooks_.watches(spec.tensor), "zero", "parameter '", spec.name,
      "' began to require gradients and got them past the engine: call the engine, not its module, for the first "
      "forward after requires_grad_(True), and add_param_group() before the first backward of an update; "
      "engine.zero_grad() drops them");
}

bool BackwardDriver::may_reduce(const StepState& step) const {
  if (step.hold || units_.options().reduce_at_step) return false;
  return units_.placements().reduce_at == shard::ReduceAt::EveryBackward || step.boundary;
}

void BackwardDriver::send_sums_to(SumSink& sink) {
  sink_ = &sink;
  reducer_->send_sums_to(sink);
}

void BackwardDriver::backward_begun(const std::vector<ScopeCall*>& calls) try {
  units_.check_here("backward");
  units_.lane().gather_rest();
  units_.check_not_captured("backward");
  sink_->backward_begun();
  reducer_->begin_backward();
  if (units_.placements().grads == shard::Placement::Replicate) part_visible_grads();
  units_.unsharder().begin_backward(calls);
  units_.phases().drop(Phase::Backward);
  units_.phases().begin(Phase::Backward);
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

// Only C++ lets a p.grad of another shape be set.
void BackwardDriver::check_shape(const Param& param, const at::Tensor& grad) {
  TESSERA_CHECK(grad.sizes() == param.tensor.sizes(), "zero", "the gradient of '", param.name, "' has shape ",
                grad.sizes(), ", and the parameter ", param.tensor.sizes(), "; give p.grad one of that shape, or none");
}

bool BackwardDriver::is_visible_view(const Place& place, const at::Tensor& grad) {
  const auto [buffer, there] = place.unit->gradient(*place.param, place.param->range);
  if (!buffer.has_memory() || grad.layout() != at::kStrided) return false;
  const at::Tensor shown = place.unit->visible(*place.param);
  return grad.sizes() == shown.sizes() && grad.strides() == shown.strides() &&
         grad.scalar_type() == shown.scalar_type() && grad.const_data_ptr() == shown.const_data_ptr() &&
         (grad.numel() == 0 || grad.storage().is_alias_of(shown.storage()));
}

void BackwardDriver::before_accumulate(ParamId id, at::Tensor& grad) try {
  const Place& place = units_[id];
  if (!place.trained()) {
    so_far_[id] = std::exchange(grad, at::Tensor());
    return;
  }
  const bool visible = place.unit->grads_are_visible();
  if (!grad.defined()) {
    if (visible && place.param->grad.has()) reducer_->clear(*place.unit, *place.param);  // the user dropped it
    return;
  }
  const at::Tensor old = std::exchange(grad, at::Tensor());
  check_shape(*place.param, old);
  if (visible && is_visible_view(place, old) && place.param->grad.has()) return;
  reducer_->clear(*place.unit, *place.param);
  reducer_->accumulate(*place.unit, *place.param, old.is_sparse() ? old.to_dense() : old, 1.0);
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

void BackwardDriver::gradient_ready(ParamId id, at::Tensor& grad, const BackwardInfo& backward, bool alone) try {
  const Place& place = units_[id];
  const StepState step = step_();
  at::Tensor arrived = std::exchange(grad, at::Tensor());  // what stays there after an error would be the user's
  if (sink_->uses_up()) check_once(backward);
  if (!backward.in_forward) sink_->compare();
  if (!place.trained()) {
    grad = waiting_sum(id, arrived, backward);
    if (place.held()) units_.unsharder().gradient_arrived(place.number, place.item);
    return;
  }
  if (arrived.defined()) {
    if (arrived.is_sparse()) arrived = arrived.to_dense();
    check_shape(*place.param, arrived);
    scaled_ = scaled_ || backward.loss_scale != 1;
    reducer_->accumulate(*place.unit, *place.param, arrived,
                         step.gradient_scale * (step.loss_scale / backward.loss_scale), alone);
  }
  // The view is shown also where this graph task brought nothing: before_accumulate took away what earlier ones left.
  if (place.unit->grads_are_visible() && place.param->grad.has()) grad = place.unit->visible(*place.param);
  units_.unsharder().gradient_arrived(place.number, place.item);
  if (!backward.in_forward) reducer_->fired(*place.unit, *place.param, may_reduce(step));
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

// The sum of all that came for a parameter that waits (Note [Joining] in joining.h), in p.grad, where the user may drop it.
at::Tensor BackwardDriver::waiting_sum(ParamId id, const at::Tensor& grad, const BackwardInfo& backward) {
  at::Tensor sum = std::exchange(so_far_[id], at::Tensor());
  if (grad.defined()) {
    const c10::AutoGradMode no_grad(false);
    const StepState step = step_();
    const double scale = step.gradient_scale * (step.loss_scale / backward.loss_scale);
    scaled_ = scaled_ || backward.loss_scale != 1;
    const at::Tensor more = (grad.is_sparse() ? grad.to_dense() : grad).detach().to(at::kFloat) * scale;
    sum = (sum.defined() ? sum.to(at::kFloat) + more : more).to(units_.options().precision.grad);
  }
  return sum;
}

// Throws where a sink could not take back what this backward adds.
void BackwardDriver::check_once(const BackwardInfo& backward) const {
  TESSERA_CHECK(!flushed_, "engine.backward",
                "the last backward has updated the model already (tessera.update_in_backward): call step() after each; "
                "several backwards to a step need update_in_backward off");
  TESSERA_CHECK(backward.loss_scale == 1, "engine.backward",
                "the loss carries the scale of another engine, which may have to skip its step; "
                "tessera.update_in_backward cannot: switch it off");
}

bool BackwardDriver::end_backward(int round) try {
  const StepState step = step_();
  if (round == 0) {
    ++backwards_;
    by_backwards_ = true;
    if (!step.hold) count_micro_batch(std::exchange(forward_came_, false));
  }
  if (may_reduce(step)) return flush_round(round, step);
  unreduced_ = true;
  return false;
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

// Where the update has seen no forward of the engine's, the module was called past it, and each backward is one.
void BackwardDriver::count_micro_batch(bool after_forward) {
  forwards_count_ = forwards_count_ || after_forward;
  if (after_forward) of_forwards_.add();
  of_backwards_.add();
}

// See Note [Ends] in hooks.h.
bool BackwardDriver::flush_round(int round, const StepState& step) {
  const c10::AutoGradMode no_grad(false);
  const bool visible = units_.placements().grads == shard::Placement::Replicate;
  switch (round) {
    case 0:
      sink_->compare();
      reducer_->launch_rest(visible);
      return true;
    case 1:
      reducer_->launch_late();
      return true;
    case 2:
      reducer_->finish();
      if (step.boundary) reducer_->launch_replicas();
      sink_->launch_end();
      return true;
    case 3:
      reducer_->finish_replicas();
      sink_->finish_end();
      unreduced_ = false;
      flushed_ = !sink_->refuses();
      if (visible && units_.ranks().size() > 1) show_remote_grads();
      return !flushed_;
    default:  // the other engines of this backward are through
      --backwards_;
      drop_gradients();
      sink_->refuse();
      return false;
  }
}

void BackwardDriver::flush() {
  const StepState step = step_();
  for (int round = 0; flush_round(round, step); ++round) {
  }
}

void BackwardDriver::reduce_replicas() {
  reducer_->launch_replicas();
  reducer_->finish_replicas();
}

// Stage 0: a parameter without a gradient on this rank has one when other ranks do. No rank need announce it: a place that is
// not zero after the reduction says so, and where it is zero (all gradients were) p.grad None means the same.
void BackwardDriver::show_remote_grads() {
  for (const ParamId id : units_.trained_ids()) {
    const Place& place = units_[id];
    const Param& p = *place.param;
    if (p.grad.has() || !p.tensor.requires_grad()) continue;
    const at::Tensor sum = place.unit->visible(p);
    if (!sum.any().item<bool>()) continue;
    place.unit->show_grad(p, true);
    p.tensor.mutable_grad() = sum;
  }
}

void BackwardDriver::reduce_now() try {
  const std::lock_guard lock(hooks_.mutex());
  flush();
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

void BackwardDriver::ensure_reduced() {
  const std::lock_guard lock(hooks_.mutex());
  hooks_.run_kept();
  for (const auto& unit : units_.all())
    unit->on_this_stream();  // a step may be under another stream than its backwards
  if (unreduced_ || !flushed_ || reducer_->is_open()) flush();
  reduce_replicas();
  adopt_grads();
}

// Stage 0: a gradient that a user put there may be a view of what is about to be written to (a.grad, b.grad = b.grad, a.grad).
void BackwardDriver::part_visible_grads() {
  const c10::AutoGradMode no_grad(false);
  for (const ParamId id : units_.trained_ids()) {
    at::Tensor& grad = units_[id].param->tensor.mutable_grad();
    if (!grad.defined() || !grad.has_storage() || grad.storage().use_count() == 1) continue;
    if (!is_visible_view(units_[id], grad)) grad = grad.detach().clone();
  }
}

void BackwardDriver::adopt_grads() {
  if (!has_gradients()) return;
  const std::lock_guard lock(hooks_.mutex());
  const c10::AutoGradMode no_grad(false);
  for (const ParamId id : units_.trained_ids())
    if (const Param& p = *units_[id].param; p.tensor.grad().defined()) check_shape(p, p.tensor.grad());
  if (units_.placements().grads == shard::Placement::Replicate) {
    adopt_visible_grads();
  } else if (!sink_->uses_up()) {  // there they are refused: check_all_watched()
    adopt_given_grads();
  }
}

void BackwardDriver::adopt_grad(const Place& place) {
  const at::Tensor& grad = place.param->tensor.grad();
  const bool had = place.unit->grads_are_visible() && place.param->grad.has();
  if (grad.defined() ? !had || !is_visible_view(place, grad) : had) adopt_grads();
}

// Note [Gradients by hand]
void BackwardDriver::adopt_given_grads() {
  for (const ParamId id : units_.trained_ids()) {
    const Place& place = units_[id];
    const Param& p = *place.param;
    at::Tensor& grad = p.tensor.mutable_grad();
    if (!grad.defined() || (p.tensor.requires_grad() && !hooks_.watches(p.tensor))) continue;
    const at::Tensor given = std::exchange(grad, at::Tensor());
    const at::Tensor dense = given.is_sparse() ? given.to_dense() : given;
    if (by_backwards_ && !dense.any().item<bool>()) {
      warn_of_zeros(p);
      have_gradient(place);
    } else if (unreduced_) {
      reducer_->clear(*place.unit, p);
      reducer_->accumulate(*place.unit, p, dense, 1.0);
    } else {
      const at::Tensor flat = shard::flatten_like_param(dense, p.form);
      put_gradient(place, flat);
      // Ranks that hold another slice of the model, or another expert, have other values of the parameter.
      const bool same = units_.ranks().all() > 1 && p.cut == nullptr && &place.unit->ranks() == &units_.ranks();
      given_[id] = same ? words_of(flat) : 0;
    }
  }
}

void BackwardDriver::warn_of_zeros(const Param& param) {
  if (!param.grad.has() || std::exchange(warned_of_zeros_, true)) return;
  TORCH_WARN("[zero] zeros that were put into the p.grad of '", param.name,
             "' do not take the place of the gradient of a backward, which p.grad does not show in this stage; call "
             "set_full_grad() where it shall be zero");
}

void BackwardDriver::put_gradient(const Place& place, const at::Tensor& flat) {
  Unit& unit = *place.unit;
  const Param& p = *place.param;
  have_gradient(place);
  const shard::Range mine = units_.local_range(place);
  const auto [buffer, there] = unit.gradient(p, unit.owned_slice(p));
  unit.on_this_stream();
  if (!mine.empty()) buffer.write(there, flat.narrow(0, mine.begin, mine.size()));
}

// Where no backward ran the whole unit becomes zeros, else its gradients stay what they are.
void BackwardDriver::have_gradient(const Place& place) {
  const Param& p = *place.param;
  if (place.unit->progress().state() == GradState::Empty) settle_empty_units();
  place.unit->make_run(p);
  place.unit->grad_came(p);
  if (place.unit->grads_are_visible()) p.tensor.mutable_grad() = place.unit->visible(p);
}

std::vector<std::string> BackwardDriver::given_lines() const {
  std::vector<std::string> lines;
  for (const auto& [id, words] : given_)
    lines.push_back(c10::str("the gradient of '", units_.params()[id].name,
                             "' put into p.grad by hand, of which every rank "
                             "needs the whole (all_reduce it, or call set_full_grad), checksum ",
                             words));
  return lines;
}

// Stage 0: p.grad is the user's. The tensor there now is the gradient, or this rank's part of it.
void BackwardDriver::adopt_visible_grads() {
  part_visible_grads();
  for (const ParamId id : units_.trained_ids())
    adopt_visible(units_[id]);
  forget_dropped();
}

void BackwardDriver::adopt_visible(const Place& place) {
  Unit& unit = *place.unit;
  const Param& p = *place.param;
  at::Tensor& grad = p.tensor.mutable_grad();
  if (!grad.defined()) {  // the user dropped it
    if (!p.grad.has()) return;
    if (unreduced_) return reducer_->clear(unit, p);
    unit.visible(p).zero_();
    unit.show_grad(p, false);
  } else if (is_visible_view(place, grad) && (p.grad.has() || !unreduced_)) {
    unit.show_grad(p, true);
  } else if (unreduced_) {
    const at::Tensor given = std::exchange(grad, at::Tensor());
    reducer_->clear(unit, p);
    reducer_->accumulate(unit, p, given.is_sparse() ? given.to_dense() : given, 1.0);
    grad = unit.visible(p);
  } else {
    unit.make_run(p);
    unit.visible(p).copy_(grad.is_sparse() ? grad.to_dense() : grad);
    unit.show_grad(p, true);
  }
}

void BackwardDriver::forget_dropped() {
  if (units_.placements().grads != shard::Placement::Replicate || !unreduced_ || hooks_.in_backward()) return;
  const auto has_grad = [](const Param& p) { return p.tensor.grad().defined(); };
  for (const auto& unit : units_.all())
    if (unit->accumulates() && (unit->ranks().size() == 1 || !unit->has_sum()) &&
        std::ranges::none_of(unit->params(), has_grad))
      reducer_->forget(*unit);
}

void BackwardDriver::take_joined(const std::vector<ParamId>& ids) try {
  const std::lock_guard lock(hooks_.mutex());
  const c10::AutoGradMode no_grad(false);
  std::vector<Unit*> all, joined;
  for (const auto& unit : units_.all()) {
    all.push_back(unit.get());
    if (std::ranges::any_of(ids, [&](ParamId id) { return units_[id].unit == unit.get(); }))
      joined.push_back(unit.get());
  }
  if (flushed_) sink_->prepare();
  for (const ParamId id : ids) {
    const Place& place = units_[id];
    const at::Tensor grad = std::exchange(place.param->tensor.mutable_grad(), at::Tensor());
    if (grad.defined()) reducer_->accumulate(*place.unit, *place.param, grad.is_sparse() ? grad.to_dense() : grad, 1.0);
  }
  reducer_->join(std::move(all), joined, /*with_others=*/!flushed_);
  if (flushed_) {
    sink_->launch_end();
    sink_->finish_end();
  }
  follow_params();
  if (units_.placements().grads != shard::Placement::Replicate) return;
  for (const ParamId id : ids) {
    const Place& place = units_[id];
    if (place.param->grad.has()) place.param->tensor.mutable_grad() = place.unit->visible(*place.param);
  }
  if (flushed_ && units_.ranks().size() > 1) show_remote_grads();
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

void BackwardDriver::drop_gradients() {
  const std::lock_guard lock(hooks_.mutex());
  hooks_.run_kept();
  reducer_->reset();
  unreduced_ = flushed_ = scaled_ = forward_came_ = forwards_count_ = by_backwards_ = false;
  of_forwards_ = of_backwards_ = {};
  given_.clear();
  const auto drop = [&](ParamId id) {
    const at::Tensor& tensor = units_.params()[id].tensor;
    if (hooks_.watches(tensor) || (tensor.requires_grad() && !Hooks::is_watched(tensor))) tensor.mutable_grad().reset();
  };
  std::ranges::for_each(units_.may_join(), drop);
  std::ranges::for_each(units_.left_out(), drop);
  for (const ParamId id : units_.trained_ids())
    units_[id].param->tensor.mutable_grad().reset();
}

void BackwardDriver::used_up(Unit& unit) {
  const std::lock_guard lock(hooks_.mutex());
  reducer_->forget(unit);
  for (const Param& p : unit.params())
    p.tensor.mutable_grad().reset();
}

void BackwardDriver::call_opened(ScopeCall& call, bool again) {
  step_();  // whoever may not run a backward now is refused before anything is gathered
  units_.unsharder().call_opened(call, again);
}

void BackwardDriver::call_closed(ScopeCall& call, const BackwardInfo& backward) try {
  for (const int number : units_.unsharder().call_closed(call)) {
    Unit* unit = units_.of_number(number);
    if (unit != nullptr && !backward.in_forward && backward.counts) reducer_->over(*unit, may_reduce(step_()));
  }
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

void BackwardDriver::call_gone(ScopeCall& call) {
  try {
    units_.unsharder().call_gone(call);
  } catch (const std::exception&) {
    // A lost peer: the next collective says so.
  }
}

void BackwardDriver::tasks_ended() {
  try {
    units_.phases().end(Phase::Backward);
    units_.unsharder().end_backward();
  } catch (const std::exception&) {
    // A peer is lost, as above; and this may run while another exception passes.
  }
}

bool BackwardDriver::reads_local_gradient(const Place& place) {
  return place.unit->accumulates() && place.param->grad.filled();
}

void BackwardDriver::settle_empty_units() {
  for (const auto& unit : units_.all()) {
    if (unit->progress().state() != GradState::Empty) continue;
    unit->put_sums();
  }
  flushed_ = true;
}

void BackwardDriver::resume(bool unreduced, bool flushed, bool scaled, bool replicas_agree) {
  unreduced_ = unreduced;
  flushed_ = flushed;
  scaled_ = scaled;
  reducer_->set_replicas_agree(replicas_agree);
  for (const ParamId id : units_.trained_ids()) {
    const Place& place = units_[id];
    if (place.unit->grads_are_visible() && place.param->grad.has())
      place.param->tensor.mutable_grad() = place.unit->visible(*place.param);
  }
}

void BackwardDriver::remove() {
  hooks_.remove();
  try {
    sink_->drop();
  } catch (const std::exception&) {
    // A device that fails: its next use throws.
  }
  reducer_->abandon();
}

}  // namespace tessera::zero

#include "tessera/zero/modules.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/transforms.h"
#include "tessera/zero/update_lane.h"

namespace tessera::zero {

namespace {

// Forward AD: its tangent has a graph of its own.
bool is_dual(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

}  // namespace

Modules::Modules(Units& units, BackwardDriver& driver) : units_(units), driver_(driver) {}

int Modules::add(const std::vector<ParamId>& params) {
  const std::vector<ParamId> held = units_.held(params, "modules().add");
  if (!units_.unsharder().any_sharded() && !units_.lane().on()) return -1;
  params_.push_back(held);
  return units_.unsharder().add_scope(units_of(held));
}

std::vector<int> Modules::units_of(const std::vector<ParamId>& params) const {
  std::vector<int> numbers;
  numbers.reserve(params.size());
  for (const ParamId id : params)
    numbers.push_back(units_[id].number);
  return numbers;
}

void Modules::follow_units() {
  for (size_t module = 0; module < params_.size(); ++module)
    units_.unsharder().set_scope(static_cast<int>(module), units_of(params_[module]));
}

void Modules::check(int module) const {
  TESSERA_CHECK_VALUE(units_.unsharder().has_scope(module), "engine", "there is no module number ", module,
                      "; use what modules().add() returned");
}

void Modules::note(int module, ParamId param) {
  std::vector<ParamId>& params = params_[module];
  if (std::ranges::find(params, param) == params.end()) params.push_back(param);
}

void Modules::register_external(int module, ParamId param) {
  const Place& place = units_.at(param, "register_external");
  if (!place.held()) return;
  check(module);
  const std::lock_guard lock(driver_.hooks().mutex());
  note(module, param);
  units_.unsharder().extend_scope(module, place.number, Hooks::inside_task());
}

void Modules::use_elsewhere(ParamId param) {
  const Place& place = units_.at(param, "use_elsewhere");
  if (!place.held()) return;
  const std::lock_guard lock(driver_.hooks().mutex());
  if (!place.flat->sharded()) return await_updates({param});
  const int scope = units_.unsharder().holding_scope();
  TESSERA_CHECK(scope >= 0, "zero", "parameter '", place.name(),
                "' is partitioned and no module of the engine is running; use GatheredParameters");
  note(scope, param);
  units_.unsharder().extend_scope(scope, place.number, Hooks::inside_task());
}

// Gathers of partitioned parameters wait for updates themselves.
void Modules::await_updates(const std::vector<ParamId>& params) {
  if (!units_.lane().on()) return;
  for (const ParamId id : params)
    if (const Place& place = units_[id]; place.trained() && !place.flat->sharded()) units_.lane().await(*place.unit);
}

bool Modules::enter(int module) {
  check(module);
  const std::lock_guard lock(driver_.hooks().mutex());
  driver_.hooks().run_kept();
  await_updates(params_[module]);
  const bool outer = units_.unsharder().enter(module, Hooks::inside_task());
  producers_.resize(units_.unsharder().depth());
  return outer && units_.unsharder().any_sharded();
}

void Modules::note_inputs(const std::vector<at::Tensor>& inputs) {
  const std::lock_guard lock(driver_.hooks().mutex());
  if (!producers_.empty()) producers_.back() = Hooks::producers_of(inputs);
}

void Modules::watch_call_of(std::vector<int> units, const std::vector<at::Tensor>& outputs,
                            const std::vector<compat::NodePtr>& producers, bool open_now) {
  if (units.empty()) return;
  const auto call = std::make_shared<ScopeCall>();
  call->units = std::move(units);
  call->outer = units_.unsharder().had_inner_calls();
  if (!driver_.hooks().watch_call(call, outputs, producers)) return;
  units_.unsharder().call_made(*call);
  if (open_now) units_.unsharder().call_opened(*call, /*again=*/false);
}

void Modules::leave(int module, const std::vector<at::Tensor>& outputs, bool hides) {
  check(module);
  const std::lock_guard lock(driver_.hooks().mutex());
  const bool in_backward = Hooks::inside_task();
  units_.unsharder().end_inner(module, in_backward);
  producers_.resize(units_.unsharder().depth());
  const std::vector<int> units = units_.unsharder().watched(module);
  const auto recorded = [](const at::Tensor& t) { return static_cast<bool>(Hooks::maker_of(t)); };
  const bool recording = c10::GradMode::is_enabled();
  const bool any = recording && std::any_of(outputs.begin(), outputs.end(), recorded);
  const bool unseen = transforms::hide_graph(recording) ||
                      (recording && (hides || std::any_of(outputs.begin(), outputs.end(), is_dual)));
  std::vector<compat::NodePtr> producers;
  if (!units.empty()) producers = std::move(producers_.back());
  if (any) {
    // What a recomputation gathered is needed at once by the backward of the same nodes. Frozen units have no gradient
    // that would tell when they are done with, so they are gathered again when their backward comes.
    std::vector<int> now, later;
    for (const int unit : units)
      (in_backward && units_.of_number(unit) != nullptr ? now : later).push_back(unit);
    watch_call_of(std::move(now), outputs, producers, /*open_now=*/true);
    watch_call_of(std::move(later), outputs, producers, /*open_now=*/false);
  }
  units_.unsharder().leave(module, in_backward, any, unseen);
  producers_.resize(units_.unsharder().depth());
}

void Modules::abort(int module) {
  check(module);
  const std::lock_guard lock(driver_.hooks().mutex());
  units_.unsharder().abort(module, Hooks::inside_task());
  producers_.resize(units_.unsharder().depth());
}

void Modules::end_stray() {
  const std::lock_guard lock(driver_.hooks().mutex());
  if (!units_.unsharder().inside_scope() || Hooks::inside_task()) return;
  units_.unsharder().abort_all();
  producers_.clear();
}

}  // namespace tessera::zero

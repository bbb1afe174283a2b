#include "tessera/engine/engine.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/heap.h"
#include "tessera/base/transforms.h"
#include "tessera/engine/agreement.h"
#include "tessera/engine/impl.h"
#include "tessera/engine/initial_values.h"
#include "tessera/engine/preflight.h"
#include "tessera/optim/norm.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/adoption.h"
#include "tessera/zero/memory_for.h"
#include "tessera/zero/update_lane.h"

namespace tessera::engine {

Engine::Engine(Options options, comm::Mesh mesh, std::vector<ParamSpec> params,
               const std::vector<optim::GroupOptions>& groups)
    : impl_(std::make_unique<Impl>(options)) {
  TESSERA_CHECK_VALUE(options.gradient_accumulation_steps >= 1, "engine",
                      "gradient_accumulation_steps must be >= 1, got ", options.gradient_accumulation_steps);
  TESSERA_CHECK_VALUE(options.gradient_clipping >= 0, "engine", "gradient_clipping must be >= 0, got ",
                      options.gradient_clipping);
  TESSERA_CHECK_VALUE(
      options.zero.update_in_backward || (options.zero.unit_clipping == 0 && options.zero.previous_clipping == 0),
      "engine", "zero.unit_clipping and zero.previous_clipping need zero.update_in_backward; use gradient_clipping");
  Impl& m = *impl_;
  if (!params.empty()) m.device = params.front().tensor.device().type();
  amp::check(options.autocast, m.device);
  // Without managed boundaries only step() knows where one is; stages that reduce after every backward need none.
  const bool at_boundary = shard::placements_of_stage(options.zero.stage).reduce_at == shard::ReduceAt::Boundary;
  m.options.zero.accumulates = options.gradient_accumulation_steps > 1 || !options.managed_accumulation;
  m.options.zero.reduce_at_step = !options.managed_accumulation && at_boundary;
  auto& precision = m.options.zero.precision;
  if (options.precision_of_model) precision = precision_of_model(params, options.accumulate_in);
  m.options.zero.cast = !options.precision_of_model;
  check_params(params, precision);
  // A client's optimizer updates tensors, which a split master is not.
  if (options.rule == optim::Rule::External && precision.master == amp::Master::Split)
    precision.master = amp::Master::Fp32;
  m.mesh = std::move(mesh);
  if (m.mesh.size(comm::Axis::Sp) > 1 && options.sequence_communication)
    m.options.zero.communication = options.sequence_communication;
  if (m.options.zero.update_in_backward) check_update_in_backward(m.options, m.mesh);
  m.params = std::move(params);
  m.notices.settle(m.mesh.rank(comm::kAxes) != 0, options.says_some_unused);
  zero::Ranks ranks(m.mesh);
  if (!m.params.empty()) ranks.device = m.params.front().tensor.device();
  std::vector<at::ScalarType> dtypes;
  for (const ParamSpec& spec : m.params)
    dtypes.push_back(spec.tensor.scalar_type());
  try {
    check_alike(ranks, m.options, m.params, groups);
    check_bounds(m.options, groups);
    m.rates = settle_offload(m.options.offload, m.options.zero, ranks, m.params,
                             optim::state_names(options.rule, groups).count);
    broadcast_unmanaged(m.mesh, m.options.zero, m.params);
    m.model = std::make_unique<zero::ShardedModel>(m.options.zero, m.mesh, m.params, options.rule, groups,
                                                   [impl = &m] { return impl->step_state(); });
    m.savers.emplace(ranks.siblings());
  } catch (const c10::OutOfMemoryError& error) {
    zero::end_groups(error, ranks);
    cast_back(m.params, dtypes);
    throw;
  } catch (...) {
    cast_back(m.params, dtypes);
    throw;
  }
  m.group_count = groups.size();
  m.state_count = optim::state_names(options.rule, groups).count;
  if (options.time_device) m.model->units.phases().wait_for(ranks.device);
  for (ParamSpec& spec : m.params)
    spec.restore = nullptr;   // they hold what restores initial values
  heap::return_free_pages();  // the storages that the parameters had
  m.scaling.attach(&m.model->driver);
  if (m.model->early.on()) m.compare_in_backward();
}

Engine::~Engine() {
  const transforms::Unobserved apart;
  impl_.reset();
}

void Engine::broadcast_buffers(const std::vector<at::Tensor>& buffers) {
  if (!impl_->options.broadcast_buffers) return;
  zero::Ranks ranks(impl_->mesh);
  ranks.device = impl_->device;
  try {
    zero::memory_for([&] { zero::broadcast_words(ranks, buffers, 0, "initial values of buffers"); },
                     "the values of buffers");
  } catch (const c10::OutOfMemoryError& error) {
    zero::end_groups(error, ranks);
    throw;
  }
}

// ---------------------------------------------------------------- parts

zero::Modules& Engine::modules() {
  return impl_->live("modules").modules;
}
zero::Regions& Engine::regions() {
  return impl_->live("regions").regions;
}
zero::StateAccess& Engine::states() {
  zero::StateAccess& states = impl_->here("states").states;
  impl_->check_beside("states");
  return states;
}
const zero::StateAccess& Engine::layout() const {
  impl_->live("layout").units.lane().settle();
  return impl_->model->states;
}
zero::Accumulation& Engine::accumulation() {
  return impl_->here("accumulation").accumulation;
}
OneThread::Call Engine::enter(const char* call) {
  impl_->live(call);
  return impl_->enter_all(call);
}
void Engine::check_one_thread(const char* call, bool together) {
  together ? impl_->check_beside(call) : impl_->check_alone(call);
}

OneThread::Call Engine::Impl::enter_all(const char* call) try {
  return {thread, call};
} catch (const UsageError& error) {
  end_ranks(error);
  throw;
}

void Engine::Impl::check_alone(const char* call) {
  thread.check_beside(call, zero::Hooks::on_autograd_thread(device));
}

void Engine::Impl::check_beside(const char* call) try { check_alone(call); } catch (const UsageError& error) {
  end_ranks(error);
  throw;
}

void Engine::Impl::end_ranks(const UsageError& error) const {
  if (model == nullptr || !savers) return;
  const zero::Ranks& ranks = model->units.ranks();
  for (const zero::Ranks* of : {&ranks, &*savers})
    for (const comm::GroupPtr& group : {of->shard, of->replicate, of->model})
      if (group->size() > 1) group->abort(error.what_without_backtrace());
}
Checkpointer& Engine::checkpoints() {
  impl_->here("checkpoints");
  if (!impl_->checkpointer) impl_->checkpointer = std::make_unique<Checkpointer>(*this, *impl_->savers);
  return *impl_->checkpointer;
}
Scaling& Engine::scaling() {
  return impl_->scaling;
}

// ---------------------------------------------------------------- step

bool Engine::step(const std::function<void()>& external, std::optional<double> global_norm, const std::string& fault) {
  Impl& m = *impl_;
  check_not_captured("step");
  const OneThread::Call call = m.enter_all("step");
  const PhaseScope scope(m.model->units.phases(), Phase::Step);
  const bool boundary = !m.options.managed_accumulation || m.boundary();
  if (boundary && !m.model->early.on()) finish_update();
  Impl::Fault why{boundary ? fault : "", nullptr};
  m.check_step(boundary, global_norm, why);
  const bool trains = has_uncounted_backward();
  const int64_t empty = m.empty_with_this();
  const bool may_be_empty = !boundary || m.counts_empty || global_norm || empty <= m.begun;  // else an error
  if (may_be_empty && !trains && !m.gradients_given()) m.notices.no_backward();
  m.in_step = true;
  bool finite = true;
  m.applied = false;
  if (boundary) {
    try {
      finite = m.apply(external, global_norm, empty, why);
    } catch (c10::OutOfMemoryError& error) {
      m.in_step = false;
      m.model->units.fail_alone(error);
    } catch (...) {
      m.in_step = false;
      throw;
    }
    ++m.global_steps;
    m.count_samples();
  }
  m.in_step = false;
  ++m.micro_steps;
  m.begun = boundary ? 0 : m.begun + 1;
  m.empty_steps = boundary ? 0 : empty;
  m.stepped_backwards = m.model->driver.backwards();
  m.model->driver.step_counted();
  m.boundary_override.reset();
  if (boundary) m.scaling.step_done(finite);  // last: it may have an error to report
  return m.applied;
}

void Engine::Impl::check_for_all(bool boundary, Fault& fault, const std::function<void()>& check) const {
  if (!boundary) return check();
  try {
    check();
  } catch (const c10::Error& error) {
    if (!fault.text.empty()) return;
    fault = {error.what_without_backtrace(), std::current_exception()};
  }
}

// `early`: an update that the backward makes may run on.
void Engine::Impl::check_may_step() const {
  live("step").early.on() ? model->units.check_not_away("step") : model->units.check_here("step");
  TESSERA_CHECK(!no_sync && !coalesce, "engine.step", "It is illegal to call Engine.step() inside ",
                no_sync ? "no_sync" : options.names.coalesce, "(); end that first");
}

void Engine::check_step() const {
  impl_->check_may_step();
  if (impl_->options.managed_accumulation && !impl_->boundary()) return;
  impl_->model->units.check_whole();
  impl_->check_keeps_gradients("step");
  impl_->model->driver.check_all_watched();
  impl_->model->regions.check_none_open();
}

// Notes what this rank alone may have against a step.
void Engine::Impl::check_step(bool boundary, std::optional<double> global_norm, Fault& fault) const {
  if (!model->units.is_away() && !model->early.on()) here("step");
  check_for_all(boundary, fault, [&] {
    check_may_step();
    TESSERA_CHECK_VALUE(!global_norm || !(*global_norm < 0), "engine.step", "global_norm must not be negative, got ",
                        global_norm.value_or(0), "; it is the root of the sum of all engines' norm_contribution()");
    TESSERA_CHECK_VALUE(!global_norm || boundary, "engine.step",
                        "global_norm at a step that is no accumulation boundary, where nothing is clipped: give it "
                        "where is_gradient_accumulation_boundary() is true");
    if (global_norm) check_keeps_gradients("step");
    if (boundary && !model->early.on()) model->regions.check_none_open();
    const std::string wrong = boundary && !model->early.on() ? group_fault() : "";
    TESSERA_CHECK_VALUE(wrong.empty(), "engine.step", wrong);
    if (boundary && options.wants_all_used) check_all_used();
  });
}

bool Engine::Impl::gradients_given() const {
  const bool before = model->driver.has_gradients();
  const bool shows = model->units.placements().grads == shard::Placement::Replicate && before;
  const auto put = [&](int id) { return params[id].tensor.grad().defined(); };
  return (begun == 0 && before) || ((begun == 0 || !shows) && std::ranges::any_of(model->units.trained_ids(), put));
}

// The boundary's part of a step. False when gradients had inf or NaN.
bool Engine::Impl::apply(const std::function<void()>& external, std::optional<double> global_norm, int64_t empty,
                         Fault& fault) {
  model->units.check_whole();
  const bool updated = model->early.on() && model->driver.flushed();
  if (updated && !fault.own) fault.text.clear();  // the next backward checks what it would update
  check_for_all(true, fault, [&] { model->driver.check_all_watched(); });
  if (!model->units.is_away()) model->driver.ensure_reduced();
  if (global_norm) *global_norm *= scaling.gradient_scale();
  const zero::GradientSummary summary = summarize("step()", empty, global_norm, fault, updated);
  if (!global_norm && !updated) check_trains(empty, model->early.on() ? std::vector<bool>() : summary.present);
  if (model->early.on()) {
    norm = LastNorm(summary.norm, summary.unread, /*asked=*/clips_by_previous());
    if (updated) previous_norm = norm;
    applied = true;
    notices.updated(model->units, model->early.present());
    model->driver.drop_gradients();
    model->early.reset();
    return true;  // nothing is skipped
  }
  const bool skips =
      global_norm || options.zero.precision.skip_nonfinite || scaling.scaler().needed() || summary.scaled;
  if (summary.finite || !skips) {
    const double unscaled = summary.norm / scaling.gradient_scale();
    double scale = optim::clip_coefficient(unscaled, options.gradient_clipping) / scaling.gradient_scale();
    if (model->updater
            .client_reads_gradients()) {  // scaled in place; a step that the client's optimizer ends may be tried again
      model->updater.scale_gradients(scale);
      scaling.gradients_times(std::exchange(scale, 1.0));
    }
    model->updater.update(summary, scale, external);
    norm = LastNorm(unscaled);
    applied = true;
    notices.updated(model->units, summary.present);
  } else {
    ++skipped_steps;
  }
  model->driver.drop_gradients();
  return summary.finite;
}

void Engine::count_empty_steps() {
  impl_->check_alone("count_empty_steps");
  impl_->counts_empty = true;
}

void Engine::finish_update() try {
  const OneThread::Call call(impl_->thread, "finish_update");
  impl_->live("finish_update").units.lane().finish();
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}

void Engine::zero_grad() {
  const OneThread::Call call(impl_->thread, "zero_grad");
  zero::ShardedModel& model = impl_->live("zero_grad");
  model.units.check_not_away("zero_grad");
  TESSERA_CHECK(!model.early.on() || !model.driver.flushed(), "engine.zero_grad",
                "the backward has updated the model with its gradients (tessera.update_in_backward); call step()");
  model.driver.drop_gradients();
  impl_->scaling.gradients_dropped();
}

double Engine::grad_norm(const std::string& fault) try {
  const OneThread::Call call = impl_->enter_all("grad_norm");
  return impl_->norm_of("grad_norm()", {fault, nullptr});
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}

double Engine::clip_grad_norm(double max_norm, const std::string& fault) try {
  Impl& m = *impl_;
  const char* const name = m.options.names.clip_grad_norm;
  const OneThread::Call call = m.enter_all(name);
  zero::ShardedModel& model = m.live(name);
  m.check_clips(name);
  Impl::Fault why{fault, nullptr};
  m.check_for_all(true, why, [&] {
    if (!(max_norm >= 0))
      TESSERA_FAIL(c10::ValueError, "[engine.", name, "] max_norm must be a number >= 0, got ", max_norm);
  });
  const double norm = m.norm_of(c10::str(name, "(", text_of(max_norm), ")"), why);
  const double scale = max_norm / (norm + 1e-6);
  if (!std::isfinite(norm) || !(scale < 1)) return norm;
  const c10::AutoGradMode no_grad(false);
  for (const int id : model.units.trained_ids())
    if (const at::Tensor gradient = model.states.local_view(id, Quantity::Gradient); gradient.defined())
      model.states.set_local(id, Quantity::Gradient,
                             gradient.mul_(scale));  // a copy, where gradients live in host memory
  return norm;
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}

double Engine::Impl::norm_of(const std::string& call, const Fault& fault) {
  Fault why = fault;
  reduce_for_norm("grad_norm", why);
  return summarize(call, empty_with_this(), {}, why).norm / scaling.gradient_scale();
}

// What one rank alone may have against the call is announced to all, in the exchange that follows.
void Engine::Impl::reduce_for_norm(const char* call, Fault& fault) {
  if (!live(call).units.is_away()) here(call);
  check_for_all(true, fault, [&] {
    here(call);
    model->driver.check_all_watched();
  });
  if (!model->units.is_away()) model->driver.ensure_reduced();
}

double Engine::norm_contribution(const std::vector<int>& without, const std::string& fault) try {
  const OneThread::Call call = impl_->enter_all("norm_contribution");
  Impl& m = *impl_;
  m.check_keeps_gradients("norm_contribution");
  Impl::Fault why{fault, nullptr};
  m.reduce_for_norm("norm_contribution", why);
  m.check_for_all(true, why, [&] { m.check_may_step(); });
  zero::ShardedModel& model = *m.model;
  const double scale = m.scaling.gradient_scale();
  const std::vector<int> waiting = model.driver.waiting();
  const StepTerms terms = m.terms("norm_contribution()", m.empty_with_this(), why.text, waiting, false);
  const at::Tensor shown = terms.shown();
  const bool counts = why.text.empty();
  std::optional<double> mine =
      model.updater.norm_contribution(without, shown.defined() ? shown.item<double>() : terms.digest(), counts);
  if (mine && why.own) std::rethrow_exception(why.own);
  if (!mine || !counts) terms.refuse(model.units.ranks());
  if (!waiting.empty()) {
    m.join(waiting);
    model.driver.ensure_reduced();
    mine = model.updater.norm_contribution(without, 0);
  }
  return *mine / (scale * scale);
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}

// ---------------------------------------------------------------- accumulation

bool Engine::is_gradient_accumulation_boundary() const {
  return impl_->boundary();
}

void Engine::set_gradient_accumulation_boundary(bool boundary) {
  impl_->check_alone("set_gradient_accumulation_boundary");
  impl_->check_accumulates("set_gradient_accumulation_boundary", boundary ? 1 : 2);
  TESSERA_CHECK(impl_->options.managed_accumulation, "engine.set_gradient_accumulation_boundary",
                "with managed_gradient_accumulation false every step() is a boundary");
  impl_->boundary_override = boundary;
}

void Engine::set_gradient_accumulation_steps(int64_t steps) {
  impl_->check_alone("set_gradient_accumulation_steps");
  impl_->check_accumulates("set_gradient_accumulation_steps", steps);
  TESSERA_CHECK_VALUE(steps >= 1, "engine", "gradient_accumulation_steps must be >= 1, got ", steps);
  impl_->check_batch(steps, impl_->options.micro_batch_size);
  impl_->options.gradient_accumulation_steps = steps;
}

void Engine::set_micro_batch_size(int64_t samples) {
  impl_->check_alone("set_micro_batch_size");
  TESSERA_CHECK_VALUE(samples >= 1, "engine", "the micro batch must be >= 1, got ", samples);
  impl_->check_batch(impl_->options.gradient_accumulation_steps, samples);
  impl_->options.micro_batch_size = samples;
}

void Engine::begin_no_sync() {
  const OneThread::Call call(impl_->thread, "no_sync");
  impl_->check_accumulates("no_sync");
  TESSERA_CHECK(!impl_->no_sync, "engine.no_sync", "no_sync() inside itself: it is local there already; leave it out");
  TESSERA_CHECK(!impl_->coalesce, "engine.no_sync", "no_sync() inside ", impl_->options.names.coalesce,
                "(): it is local there already; leave it out");
  impl_->no_sync = true;
}

void Engine::end_no_sync() {
  impl_->no_sync = false;
}

void Engine::begin_coalesce() {
  const char* const name = impl_->options.names.coalesce;
  const OneThread::Call call(impl_->thread, name);
  impl_->check_accumulates(name);
  TESSERA_CHECK(!impl_->no_sync && !impl_->coalesce, "engine", name, ": inside ",
                impl_->no_sync ? "no_sync()" : "itself", "; end that first");
  TESSERA_CHECK_VALUE(impl_->options.managed_accumulation, "engine", name,
                      ": managed_gradient_accumulation false already reduces once a step");
  impl_->coalesce = true;
}

void Engine::leave_coalesce() {
  impl_->coalesce = false;
}

void Engine::end_coalesce() {
  impl_->coalesce = false;
  if (impl_->model) impl_->model->driver.reduce_now();
}

// ---------------------------------------------------------------- what happened

std::optional<double> Engine::global_grad_norm() const {
  return impl_->norm.get();
}
std::optional<double> Engine::previous_norm() const {
  return impl_->clips_by_previous() ? impl_->previous_norm.get() : impl_->norm.get();
}
void Engine::set_previous_norm(std::optional<double> norm) {
  impl_->previous_norm = LastNorm(norm);
}
bool Engine::has_gradients() const {
  return impl_->model != nullptr && impl_->model->driver.has_gradients();
}
bool Engine::was_step_applied() const {
  return impl_->applied;
}
int64_t Engine::micro_steps() const {
  return impl_->micro_steps;
}
int64_t Engine::begun_micro_steps() const {
  return impl_->begun;
}
bool Engine::has_uncounted_backward() const {
  return impl_->live("has_uncounted_backward").driver.backwards() != impl_->stepped_backwards;
}
int64_t Engine::backwards() const {
  return impl_->live("backwards").driver.backwards();
}
int64_t Engine::global_steps() const {
  return impl_->global_steps;
}
int64_t Engine::skipped_steps() const {
  return impl_->skipped_steps;
}

int64_t Engine::global_samples() const {
  return impl_->global_samples;
}

std::vector<std::string> Engine::take_notices() {
  if (impl_->model != nullptr) impl_->notices.thawed(impl_->model->units);
  return impl_->notices.take();
}

void Engine::set_counters(int64_t micro_steps, int64_t global_steps, int64_t skipped_steps, int64_t global_samples) {
  if (micro_steps != impl_->micro_steps)
    set_begun_micro_steps(micro_steps % impl_->options.gradient_accumulation_steps);
  impl_->micro_steps = micro_steps;
  impl_->global_steps = global_steps;
  impl_->skipped_steps = skipped_steps;
  impl_->global_samples = global_samples;
}

void Engine::set_begun_micro_steps(int64_t begun) {
  impl_->begun = begun;
  impl_->boundary_override.reset();
}

// ---------------------------------------------------------------- optimizer and state access

void Engine::set_fault(const std::string& fault) {
  impl_->fault = fault;
}

void Engine::set_client_terms(const std::vector<std::string>& lines, const std::vector<DeviceTerm>& on_device) {
  impl_->client_terms = lines;
  impl_->device_terms = on_device;
}

std::vector<optim::GroupOptions>& Engine::groups() {
  return impl_->live("groups").units.groups();
}
const Options& Engine::options() const {
  return impl_->options;
}
const comm::Mesh& Engine::mesh() const {
  return impl_->mesh;
}
const std::vector<ParamSpec>& Engine::params() const {
  return impl_->params;
}

void Engine::refresh_params() try {
  const OneThread::Call call(impl_->thread, "refresh_params");
  finish_update();
  impl_->here("refresh_params").updater.refresh_params();
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}
void Engine::adopt_params() try {
  const OneThread::Call call(impl_->thread, "adopt_params");
  zero::adopt_params(impl_->here("adopt_params").units, /*compare=*/true);
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}

Engine::Memory Engine::memory() const {
  return impl_->model ? impl_->model->memory() : Memory();
}

const Phases& Engine::phases() const {
  return impl_->live("phases").units.phases();
}

void Engine::destroy(bool waits) {
  if (!impl_->model) return;
  const OneThread::Call call(impl_->thread, "destroy");
  const transforms::Unobserved apart;
  std::exception_ptr error;
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  };
  attempt([&] {
    if (impl_->checkpointer && waits) impl_->checkpointer->wait();
  });
  if (impl_->model->units.lane().stop())
    TORCH_WARN(
        "[engine.destroy] the last update ran on, and what other ranks updated of the parameters is not here; call "
        "finish_update() on all ranks before");
  attempt([&] { impl_->model->moving.weights_come_back(); });  // they keep their values
  std::vector<std::pair<zero::ParamId, at::Tensor>> whole;
  attempt([&] { whole = impl_->model->regions.whole_copies(); });
  impl_->checkpointer.reset();
  impl_->savers.reset();
  impl_->scaling.attach(nullptr);
  impl_->model.reset();
  for (const auto& [id, values] : whole)
    shard::set_data(impl_->params[id].tensor, values);
  impl_->mesh = comm::Mesh();  // who destroys the groups next waits for none of this engine
  if (error) std::rethrow_exception(error);
}

bool Engine::destroyed() const {
  return impl_->model == nullptr;
}

}  // namespace tessera::engine

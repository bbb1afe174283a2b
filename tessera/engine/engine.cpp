#include "tessera/engine/engine.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/heap.h"
#include "tessera/engine/initial_values.h"
#include "tessera/engine/preflight.h"
#include "tessera/optim/norm.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/sharded_model.h"

namespace tessera::engine {

namespace {

// One of another dtype than the trained ones stays whole where nothing is to be cast.
bool partitions_frozen(const Options& options, const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  const bool fits = options.precision_of_model ? dtype == options.zero.precision.param : at::isFloatingType(dtype);
  return fits && shard::placements_of_stage(options.zero.stage).params == shard::Placement::Shard &&
         tensor.numel() > options.zero.gather.persistence_threshold;
}

}  // namespace

struct Engine::Impl {
  Options options;
  comm::Mesh mesh;
  std::vector<ParamSpec> params;
  std::vector<int> slot_of;   // index in `params` -> slot of the model, -1 without a group
  std::vector<int> place_of;  // the same for all that the model holds: also partitioned parameters without a group
  std::unique_ptr<zero::ShardedModel> model;

  int64_t micro_steps = 0, global_steps = 0, skipped_steps = 0, global_samples = 0;
  int64_t counted_backwards = 0;  // by earlier steps
  std::optional<bool> boundary_override;
  bool in_step = false, no_sync = false, coalesce = false, applied = false;
  std::optional<double> norm;
  bool scale_by_accumulation = true;  // for the engine.backward() in progress
  amp::GradScaler scaler;
  double gradient_scale = 1;  // the loss scale of the gradients since the last step
  c10::DeviceType device = at::kCPU;
  std::vector<amp::AutocastRegion> regions;  // of the forwards under way
  bool told_of_region = false;

  zero::ShardedModel& live(const char* call) const {
    TESSERA_CHECK(model != nullptr, "engine", call, ": the engine was destroyed; build a new one");
    return *model;
  }

  bool boundary() const {
    if (!options.managed_accumulation) return in_step;
    if (boundary_override) return *boundary_override;
    return (micro_steps + 1) % options.gradient_accumulation_steps == 0;
  }

  // Gradients that are there keep their scale.
  void publish_scale() {
    model->hooks().guard(scaler.needed());
    if (model->has_gradients()) return;
    gradient_scale = scaler.scale();
    model->set_loss_scale(gradient_scale);
  }

  void publish_policy() { model->set_sync_policy({boundary(), no_sync || coalesce}); }

  bool apply(const std::function<void()>& external);

  void count_samples() {
    const int64_t before = std::exchange(counted_backwards, model->backwards());
    const int64_t batches =
        options.managed_accumulation ? options.gradient_accumulation_steps : counted_backwards - before;
    global_samples += options.micro_batch_size * mesh.dp_size() * batches;
  }

  void leave_region() {
    if (regions.empty()) return;
    regions.back().leave();
    regions.pop_back();
  }

  int slot(int param, const char* call) const {
    TESSERA_CHECK_VALUE(param >= 0 && param < static_cast<int>(slot_of.size()), "engine", call, ": no parameter ",
                        param);
    TESSERA_CHECK_VALUE(slot_of[param] >= 0, "engine", call, ": parameter '", params[param].name,
                        "' is not optimized and has no states");
    return slot_of[param];
  }
};

Engine::Engine(Options options, comm::Mesh mesh, std::vector<ParamSpec> params,
               const std::vector<optim::GroupOptions>& groups)
    : impl_(std::make_unique<Impl>()) {
  TESSERA_CHECK_VALUE(options.gradient_accumulation_steps >= 1, "engine",
                      "gradient_accumulation_steps must be >= 1, got ", options.gradient_accumulation_steps);
  TESSERA_CHECK_VALUE(options.gradient_clipping >= 0, "engine", "gradient_clipping must be >= 0, got ",
                      options.gradient_clipping);
  Impl& m = *impl_;
  m.options = options;
  m.scaler = amp::GradScaler(options.scaler);
  if (!params.empty()) m.device = params.front().tensor.device().type();
  amp::check(options.autocast, m.device);
  // Without managed boundaries only step() knows where one is; stages that reduce after every backward need none.
  const bool at_boundary = shard::placements_of_stage(options.zero.stage).reduce_at == shard::ReduceAt::Boundary;
  m.options.zero.reduce_at_step = !options.managed_accumulation && at_boundary;
  auto& precision = m.options.zero.precision;
  if (options.precision_of_model) precision = precision_of_model(params, options.accumulate_in);
  check_params(params, precision);
  // A client's optimizer updates tensors: a split master is none.
  if (options.rule == optim::Rule::External && precision.master == amp::Master::Split)
    precision.master = amp::Master::Fp32;
  m.mesh = std::move(mesh);
  m.params = std::move(params);
  std::vector<zero::ModelParam> managed, frozen;
  const auto trained = std::count_if(m.params.begin(), m.params.end(), [](const auto& s) { return s.group >= 0; });
  for (const ParamSpec& spec : m.params) {
    auto& list = spec.group >= 0 ? managed : frozen;
    const bool held = spec.group >= 0 || partitions_frozen(m.options, spec.tensor);
    const auto first = spec.group >= 0 ? 0 : trained;
    m.place_of.push_back(held ? static_cast<int>(first + static_cast<std::ptrdiff_t>(list.size())) : -1);
    m.slot_of.push_back(spec.group >= 0 ? m.place_of.back() : -1);
    if (held) list.push_back({spec.name, spec.tensor, spec.group, spec.unit, spec.restore, spec.comm});
  }
  zero::DataParallel ranks(m.mesh);
  if (!m.params.empty()) ranks.device = m.params.front().tensor.device();
  check_alike(ranks, m.options, m.params, groups);
  const auto cast = options.precision_of_model ? std::nullopt : std::optional(precision.param);
  share_unmanaged(ranks, m.params, m.place_of, cast);
  m.model = std::make_unique<zero::ShardedModel>(m.options.zero, ranks, managed, frozen, options.rule, groups);
  managed.clear();  // they hold what restores initial values
  frozen.clear();
  for (ParamSpec& spec : m.params)
    spec.restore = nullptr;
  heap::return_free_pages();  // the storages that the parameters had
  m.model->set_gradient_scale(1.0 / static_cast<double>(options.gradient_accumulation_steps));
  m.publish_policy();
  m.publish_scale();
}

Engine::~Engine() = default;

void Engine::broadcast_buffers(const std::vector<at::Tensor>& buffers) {
  if (impl_->options.share_buffers) share_buffers(zero::DataParallel(impl_->mesh), buffers, impl_->device);
}

// ---------------------------------------------------------------- forward

bool Engine::pre_forward() {
  zero::ShardedModel& model = impl_->live("forward");
  model.follow_params();
  if (!model.hooks().in_forward()) model.end_stray_scopes();
  model.hooks().enter_forward();
  impl_->regions.emplace_back(impl_->options.autocast, impl_->device);
  const bool first = impl_->regions.back().switched_off() && !impl_->told_of_region;
  impl_->told_of_region = impl_->told_of_region || first;
  return first;
}

void Engine::post_forward(const std::vector<at::Tensor>& outputs) {
  zero::ShardedModel& model = impl_->live("forward");
  impl_->leave_region();
  model.hooks().leave_forward();
  model.hooks().watch_outputs(outputs);
}

void Engine::abort_forward() {
  impl_->leave_region();
  if (impl_->model) impl_->model->hooks().leave_forward();
}

// ---------------------------------------------------------------- modules and regions

namespace {

std::vector<int> held_places(const std::vector<int>& place_of, const std::vector<int>& params, const char* call) {
  std::vector<int> places;
  for (const int param : params) {
    TESSERA_CHECK_VALUE(param >= 0 && param < static_cast<int>(place_of.size()), "engine", call, ": no parameter ",
                        param);
    if (place_of[param] >= 0) places.push_back(place_of[param]);
  }
  return places;
}

}  // namespace

int Engine::add_module(const std::vector<int>& params) {
  zero::ShardedModel& model = impl_->live("add_module");
  const std::vector<int> places = held_places(impl_->place_of, params, "add_module");
  return model.partitions_params() ? model.add_scope(places) : -1;
}

bool Engine::enter_module(int module) {
  return impl_->live("forward").enter_scope(module);
}
void Engine::note_inputs(const std::vector<at::Tensor>& inputs) {
  impl_->live("forward").note_inputs(inputs);
}
void Engine::leave_module(int module, const std::vector<at::Tensor>& outputs) {
  impl_->live("forward").leave_scope(module, outputs);
}
void Engine::abort_module(int module) {
  if (impl_->model) impl_->model->abort_scope(module);
}

bool Engine::inside_module() const {
  return impl_->model && impl_->model->inside_scope();
}

void Engine::use_elsewhere(int param) {
  for (const int place : held_places(impl_->place_of, {param}, "use_elsewhere"))
    impl_->live("use_elsewhere").use_elsewhere(place);
}
void Engine::register_external(int module, int param) {
  for (const int place : held_places(impl_->place_of, {param}, "register_external"))
    impl_->live("register_external").extend_scope(module, place);
}

bool Engine::is_gathered(int param) const {
  for (const int place : held_places(impl_->place_of, {param}, "is_gathered"))
    return impl_->live("is_gathered").is_gathered(place);
  return true;
}

zero::ParamPartition Engine::partition_of(int param) const {
  for (const int place : held_places(impl_->place_of, {param}, "partition_of"))
    return impl_->live("partition_of").partition_of(place);
  const at::Tensor& tensor = impl_->params[param].tensor;
  return {zero::ParamState::Ready, false, {0, tensor.numel()}, shard::flatten_like_param(tensor, tensor)};
}

void Engine::gather(const std::vector<int>& params, bool writable) {
  impl_->live("gather").open_region(held_places(impl_->place_of, params, "gather"), writable);
}

void Engine::release(const std::vector<int>& params, Writes writes, int writer) {
  zero::ShardedModel& model = impl_->live("release");
  TESSERA_CHECK_VALUE(writes != Writes::FromRank || (writer >= 0 && writer < impl_->mesh.dp_size()),
                      "zero.GatheredParameters", "modifier_rank ", writer, " is no rank of a group of ",
                      impl_->mesh.dp_size());
  model.close_region(held_places(impl_->place_of, params, "release"), writes, writer);
}

// ---------------------------------------------------------------- backward

at::Tensor Engine::begin_backward(const at::Tensor& loss, bool scale_wrt_gas) {
  zero::ShardedModel& model = impl_->live("backward");
  TESSERA_CHECK_VALUE(loss.defined() && loss.numel() == 1 && loss.grad_fn(), "engine.backward",
                      "loss must be a scalar tensor with a graph (one element and a grad_fn); call forward with "
                      "gradients enabled, or use out.backward(gradient) for other shapes");
  at::Tensor scaled = impl_->scaler.needed() ? model.hooks().scale(loss, impl_->scaler.scale()) : loss;
  // From here on end_backward() will come: what is refused above leaves nothing behind.
  if (!scale_wrt_gas) model.set_gradient_scale(1.0);
  impl_->scale_by_accumulation = scale_wrt_gas;
  return scaled;
}

at::Tensor Engine::end_backward(const at::Tensor& loss) {
  const double scale = 1.0 / static_cast<double>(impl_->options.gradient_accumulation_steps);
  if (impl_->model) impl_->model->set_gradient_scale(scale);
  const bool scaled = std::exchange(impl_->scale_by_accumulation, true);
  const at::Tensor value = loss.detach();
  return scaled && scale != 1.0 ? value * scale : value;
}

at::Tensor Engine::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  const at::Tensor scaled = begin_backward(loss, scale_wrt_gas);
  try {
    scaled.backward({}, retain_graph);
  } catch (...) {
    end_backward(loss);
    throw;
  }
  return end_backward(loss);
}

// ---------------------------------------------------------------- loss scaling

at::Tensor Engine::scale(const at::Tensor& x) {
  zero::ShardedModel& model = impl_->live("scale");
  TESSERA_CHECK_VALUE(x.defined() && at::isFloatingType(x.scalar_type()) && x.grad_fn(), "engine.scale",
                      "scale() takes a scalar tensor with a graph (a loss), or any other floating tensor with a graph; "
                      "call forward with gradients enabled");
  return impl_->scaler.needed() ? model.hooks().scale(x, impl_->scaler.scale()) : x;
}

const amp::GradScaler& Engine::scaler() const {
  return impl_->scaler;
}

void Engine::set_loss_scale(double scale) {
  impl_->live("set_loss_scale");
  impl_->scaler.set_scale(scale);
  impl_->publish_scale();
}

void Engine::override_loss_scale(double scale) {
  impl_->live("override_loss_scale");
  impl_->scaler.override_scale(scale);
  impl_->publish_scale();
}

void Engine::restore_scaler(const amp::GradScaler::State& state) {
  impl_->live("restore_scaler");
  impl_->scaler.restore(state);
  impl_->publish_scale();
}

double Engine::gradient_loss_scale() const {
  return impl_->gradient_scale;
}

// ---------------------------------------------------------------- step

bool Engine::step(const std::function<void()>& external) {
  Impl& m = *impl_;
  m.live("step");
  TESSERA_CHECK(!m.no_sync && !m.coalesce, "engine.step", "It is illegal to call Engine.step() inside ",
                m.no_sync ? "no_sync" : "coalesce_grad_reduction", " context manager; leave it first");
  m.in_step = true;
  const bool boundary = m.boundary();
  bool finite = true;
  m.applied = false;
  if (boundary) {
    try {
      finite = m.apply(external);
    } catch (...) {
      m.in_step = false;
      throw;
    }
    ++m.global_steps;
    m.count_samples();
  }
  m.in_step = false;
  ++m.micro_steps;
  m.boundary_override.reset();
  m.publish_policy();
  if (boundary) {
    m.scaler.update(!finite);  // last: it may have an error to report
    m.publish_scale();
  }
  return m.applied;
}

// The boundary's part of a step. False when gradients had inf or NaN.
bool Engine::Impl::apply(const std::function<void()>& external) {
  model->ensure_reduced();
  const zero::GradientSummary summary = model->summarize();
  const bool skips = options.zero.precision.skip_nonfinite || scaler.needed() || summary.scaled;
  if (summary.finite || !skips) {
    const double unscaled = summary.norm / gradient_scale;
    double scale = optim::clip_coefficient(unscaled, options.gradient_clipping) / gradient_scale;
    if (model->client_reads_gradients()) {  // in place; a step that the client's optimizer ends may be tried again
      model->scale_gradients(scale);
      gradient_scale *= std::exchange(scale, 1.0);
      model->set_loss_scale(gradient_scale);
    }
    model->update(summary, scale, external);
    norm = unscaled;
    applied = true;
  } else {
    ++skipped_steps;
  }
  model->drop_gradients();
  return summary.finite;
}

void Engine::zero_grad() {
  impl_->live("zero_grad").drop_gradients();
  impl_->publish_scale();
}

double Engine::grad_norm() {
  zero::ShardedModel& model = impl_->live("grad_norm");
  model.ensure_reduced();
  return model.summarize().norm / impl_->gradient_scale;
}

// ---------------------------------------------------------------- accumulation

bool Engine::is_gradient_accumulation_boundary() const {
  return impl_->boundary();
}

void Engine::set_gradient_accumulation_boundary(bool boundary) {
  impl_->live("set_gradient_accumulation_boundary");
  TESSERA_CHECK(impl_->options.managed_accumulation, "engine.set_gradient_accumulation_boundary",
                "with managed_gradient_accumulation false every step() is a boundary");
  impl_->boundary_override = boundary;
  impl_->publish_policy();
}

void Engine::set_gradient_accumulation_steps(int64_t steps) {
  TESSERA_CHECK_VALUE(steps >= 1, "engine", "gradient_accumulation_steps must be >= 1, got ", steps);
  impl_->options.gradient_accumulation_steps = steps;
  impl_->live("set_gradient_accumulation_steps").set_gradient_scale(1.0 / static_cast<double>(steps));
  impl_->publish_policy();
}

void Engine::set_micro_batch_size(int64_t samples) {
  TESSERA_CHECK_VALUE(samples >= 1, "engine", "the micro batch must be >= 1, got ", samples);
  impl_->options.micro_batch_size = samples;
}

void Engine::begin_no_sync() {
  impl_->live("no_sync");
  TESSERA_CHECK(!impl_->no_sync, "engine.no_sync", "no_sync context manager reentry is unsupported");
  TESSERA_CHECK(!impl_->coalesce, "engine.no_sync",
                "no_sync inside coalesce_grad_reduction: it is already local there");
  impl_->no_sync = true;
  impl_->publish_policy();
}

void Engine::end_no_sync() {
  impl_->no_sync = false;
  if (impl_->model) impl_->publish_policy();
}

void Engine::begin_coalesce() {
  impl_->live("coalesce_grad_reduction");
  TESSERA_CHECK(!impl_->no_sync && !impl_->coalesce, "engine.coalesce_grad_reduction",
                "coalesce_grad_reduction nested in ", impl_->no_sync ? "no_sync" : "itself", " is unsupported");
  TESSERA_CHECK_VALUE(impl_->options.managed_accumulation, "engine.coalesce_grad_reduction",
                      "managed_gradient_accumulation false already reduces once a step");
  impl_->coalesce = true;
  impl_->publish_policy();
}

void Engine::end_coalesce() {
  impl_->coalesce = false;
  if (!impl_->model) return;
  impl_->publish_policy();
  impl_->model->reduce_now();
}

// ---------------------------------------------------------------- what happened

std::optional<double> Engine::global_grad_norm() const {
  return impl_->norm;
}
bool Engine::has_gradients() const {
  return impl_->model != nullptr && impl_->model->has_gradients();
}
bool Engine::was_step_applied() const {
  return impl_->applied;
}
int64_t Engine::micro_steps() const {
  return impl_->micro_steps;
}
int64_t Engine::backwards() const {
  return impl_->live("backwards").backwards();
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

void Engine::set_counters(int64_t micro_steps, int64_t global_steps, int64_t skipped_steps, int64_t global_samples) {
  impl_->micro_steps = micro_steps;
  impl_->global_steps = global_steps;
  impl_->skipped_steps = skipped_steps;
  impl_->global_samples = global_samples;
  if (impl_->model) impl_->publish_policy();
}

// ---------------------------------------------------------------- optimizer and state access

std::vector<optim::GroupOptions>& Engine::groups() {
  return impl_->live("groups").groups();
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

int64_t Engine::param_step(int param) const {
  return impl_->live("param_step").param(impl_->slot(param, "param_step")).step;
}

void Engine::set_param_step(int param, int64_t step) {
  impl_->live("set_param_step").param(impl_->slot(param, "set_param_step")).step = step;
}

at::Tensor Engine::get_full(int param, Quantity what) {
  return impl_->live("get_full").get_full(impl_->slot(param, "get_full"), what);
}

void Engine::set_full(int param, Quantity what, const at::Tensor& value) {
  impl_->live("set_full").set_full(impl_->slot(param, "set_full"), what, value);
}

at::Tensor Engine::local_view(int param, Quantity what) {
  return impl_->live("local_view").local_view(impl_->slot(param, "local_view"), what);
}

void Engine::set_local(int param, Quantity what, const at::Tensor& value) {
  impl_->live("set_local").set_local(impl_->slot(param, "set_local"), what, value);
}

std::vector<shard::NamedShard> Engine::named_shards() const {
  std::vector<int> param_of(impl_->params.size());
  for (size_t i = 0; i < impl_->params.size(); ++i)
    if (impl_->place_of[i] >= 0) param_of[impl_->place_of[i]] = static_cast<int>(i);
  std::vector<shard::NamedShard> shards = impl_->live("named_shards").named_shards();
  for (shard::NamedShard& shard : shards)
    shard.param = param_of[shard.param];
  for (size_t i = 0; i < impl_->params.size(); ++i) {
    if (impl_->place_of[i] >= 0) continue;
    const at::Tensor& tensor = impl_->params[i].tensor;
    shards.push_back({impl_->params[i].name,
                      static_cast<int>(i),
                      Quantity::Weight,
                      tensor,
                      {0, tensor.numel()},
                      tensor.scalar_type(),
                      impl_->mesh.dp_rank(),
                      false});
  }
  return shards;
}

at::Tensor Engine::read_shard(const shard::NamedShard& shard) {
  zero::ShardedModel& model = impl_->live("read_shard");
  const std::vector<int> places = held_places(impl_->place_of, {shard.param}, "read_shard");
  if (places.empty()) return shard::flatten_like_param(impl_->params[shard.param].tensor.detach(), shard.form);
  shard::NamedShard inner = shard;
  inner.param = places.front();
  return model.read_shard(inner);
}

std::pair<int64_t, int64_t> Engine::local_range(int param) const {
  const shard::Range range = impl_->live("local_range").local_range(impl_->slot(param, "local_range"));
  return {range.begin, range.end};
}

at::Tensor Engine::gather_full(int param, const at::Tensor& part) {
  return impl_->live("gather_full").gather_full(impl_->slot(param, "gather_full"), part);
}

at::Tensor Engine::local_part(int param, const at::Tensor& full) {
  return impl_->live("local_part").local_part(impl_->slot(param, "local_part"), full);
}

double Engine::agree_max(double value) {
  return impl_->live("agree_max").agree_max(value);
}

void Engine::refresh_params() {
  impl_->live("refresh_params").refresh_params();
}
void Engine::adopt_params() {
  impl_->live("adopt_params").adopt_params(/*compare=*/true);
}

Engine::Memory Engine::memory() const {
  Memory memory;
  if (!impl_->model) return memory;
  const auto bytes = [](const at::Tensor& t) { return t.defined() ? static_cast<int64_t>(t.nbytes()) : 0; };
  for (const auto& unit : impl_->model->units()) {
    memory.params += unit->flat->bytes();
    memory.grads += bytes(unit->grads);
    memory.master += bytes(unit->master) + bytes(unit->residual);
    for (const at::Tensor& state : unit->states)
      memory.states += bytes(state);
  }
  for (const auto& flat : impl_->model->frozen())
    memory.params += flat->bytes();
  memory.buckets = impl_->model->pool_bytes();
  memory.peak_buckets = impl_->model->peak_pool_bytes();
  memory.shared = impl_->model->shared_bytes();
  return memory;
}

void Engine::destroy() {
  if (!impl_->model) return;
  impl_->model->release();
  impl_->model.reset();
  impl_->mesh = comm::Mesh();  // who destroys the groups next waits for none of this engine
}

bool Engine::destroyed() const {
  return impl_->model == nullptr;
}

}  // namespace tessera::engine

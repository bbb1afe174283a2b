#include "tessera/nn/session.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/caught_warnings.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/torch_file.h"
#include "tessera/comm/averages.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"
#include "tessera/config/value.h"
#include "tessera/engine/build.h"
#include "tessera/engine/export.h"
#include "tessera/nn/cut_layers.h"
#include "tessera/nn/cut_model.h"
#include "tessera/nn/parallel.h"
#include "tessera/nn/saved_values.h"

namespace tessera::nn {

namespace {

// What only a mesh can give is never left out silently.
void check_axes(const Config& config, const comm::Mesh& mesh) {
  const auto check = [&](comm::Axis axis, int64_t ranks, const char* key) {
    TESSERA_CHECK_VALUE(ranks <= 1 || mesh.size(axis) == ranks, "initialize", key, " is ", ranks, ", but the mesh has ",
                        mesh.size(axis), " ranks along '", comm::axis_name(axis), "'");
  };
  check(comm::Axis::Sp, config.sequence_parallel_size, "sequence_parallel_size");
  check(comm::Axis::Tp, config.tensor_parallel.autotp_size, "tensor_parallel.autotp_size");
}

optim::OptimizerOptions configured_optimizer(const Config& config) {
  const std::string& type = config.optimizer.type;
  TESSERA_CHECK_BUILT(type != "LBFGS", "initialize", kNeedsClosure);
  auto found = config::native_optimizer(config);
  if (!found) found = config::torch_optimizer(config);
  TESSERA_CHECK_VALUE(found, "initialize", "the configuration names no optimizer that runs in C++",
                      config::where_optimizer_runs(type), "; set optimizer.type to one of ", optim::cpp_types(),
                      ", or give Recipe::optimizer one of torch::optim, or of your own");
  return *found;
}

}  // namespace

comm::Mesh environment_mesh(const Config& config) {
  return comm::environment_mesh(static_cast<int>(config.zero_optimization.mics_shard_size),
                                static_cast<int>(config.sequence_parallel_size),
                                static_cast<int>(std::max<int64_t>(1, config.tensor_parallel.autotp_size)));
}

template <class F>
auto Session::noting(const F& call) {
  const CaughtWarnings caught;
  auto result = call();
  note(caught.texts());
  return result;
}

Session::Session(std::shared_ptr<torch::nn::Module> module, const Config& config, comm::Mesh mesh,
                 const Construction* building, const Recipe& recipe, Part part)
    : module_(std::move(module)), watch_(config), logs_(part != Part::Other && mesh.rank(comm::kAxes) == 0) {
  TESSERA_CHECK_VALUE(module_ != nullptr, "initialize", "the module is null");
  config.validate();
  check_axes(config, mesh);
  warn(config::check_cpp_serves(config));
  if (watch_.calls() != nullptr) mesh = comm::timed_mesh(mesh, watch_.calls());
  gathers_for_export_ =
      !config::placements(config).shards_params() || config.zero_optimization.stage3_gather_16bit_weights_on_model_save;
  steps_per_print_ = config.steps_per_print.value_or(1);
  logs_memory_ = config.memory_breakdown;
  read_checkpoint_section(config);
  auto options = engine::options_from(config, mesh.size(comm::kBatchAxes));
  TESSERA_CHECK_BUILT(!(config.fp16.enabled && config.fp16.auto_cast), "initialize",
                      "fp16.auto_cast casts inputs in Python only; cast them to at::kHalf yourself");
  engine::UnitNames units = recipe.units(*module_);
  if (config::placements(config).shards_params()) {
    const engine::Outline model = outline(*module_);
    const engine::Leaves marked = engine::configured_leaves(model, config.zero_optimization);
    warn(marked.warnings);
    leaves_ = engine::outermost(model, marked.modules);
    units = engine::partition_units(model, units, leaves_);
  }
  plan_ = cut_model(*module_, config, mesh.group(comm::Axis::Tp), building, recipe.facts);
  if (plan_) warn(plan_->warnings);
  for (const at::Tensor& param : module_->parameters())
    if (const CutParamPtr note = cut_note(param); note != nullptr) cuts_.emplace_back(param, note);
  auto specs = param_specs(*module_, units);
  prepare_optimizer(config, recipe, part == Part::Whole, specs);
  if (client_ != nullptr) {
    options.rule = optim::Rule::External;
    options.client_type = client_->type();
    options.client_optimizer = client_->description();
    const bool is_cut = std::ranges::any_of(specs, [](const auto& spec) { return spec.cut != nullptr; });
    const std::string stage = "stage " + std::to_string(config.zero_optimization.stage);
    client_->check_cut(config::placements(config).shards_states() ? stage : "", is_cut,
                       config.zero_allow_untested_optimizer);
  }
  if (options.autocast.enabled) {
    mark_autocast(*module_, config.torch_autocast.lower_precision_safe_modules.value_or(default_autocast_modules()),
                  options.autocast.dtype, specs);
  }
  if (mesh.size(comm::Axis::Sp) > 1 && !recipe.parts_alone)
    checks_sequence_ =
        part == Part::Whole && config.sequence_parallel_size > 1 ? SequenceCheck::Error : SequenceCheck::Warning;
  if (building != nullptr) building->hand_over(specs);
  core_ = noting([&] { return std::make_shared<engine::Engine>(options, std::move(mesh), std::move(specs), groups_); });
  live().broadcast_buffers(module_->buffers());
  if (client_ != nullptr)
    client_->take(*core_,
                  !config::placements(config).shards_states() && live().options().zero.precision.master_is_param());
  rest_ = connect_scopes(*module_, core_, leaves_);
  contents_ = std::make_unique<Contents>(module_);
  const bool is_16bit = live().options().zero.precision.param != at::kFloat;
  const auto kept = config.data_types.keep_in_fp32_modules.value_or(std::vector<std::string>());
  cast_buffers(*module_, config.data_types.buffer_dtype, is_16bit ? kept : std::vector<std::string>());
  apply_schedule();
  watch_.attach(live(), logs_);
  if (!logs_) return;
  for (const std::string& line : watch_.dump(live(), groups()))
    watch_.line().say("[tessera] " + line);
  for (auto& writer : engine::metric_writers(config))
    add_writer(std::move(writer));
}

// Settles the param groups, and who updates them by which rates.
void Session::prepare_optimizer(const Config& config, const Recipe& recipe, bool whole,
                                std::vector<engine::ParamSpec>& specs) {
  own_schedule_ = recipe.schedule;
  if (own_schedule_ == nullptr) schedule_ = config::native_schedule(config);
  TESSERA_CHECK_VALUE(
      schedule_ || own_schedule_ || config.scheduler.type.empty(), "initialize",
      "the configuration names no schedule that runs in C++", config::where_schedule_runs(config.scheduler.type),
      "; set scheduler.type to one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest, or "
      "give Recipe::schedule one of your own");
  if (recipe.optimizer != nullptr) {
    TESSERA_CHECK_VALUE(recipe.groups.empty(), "initialize",
                        "an optimizer of one's own has its groups already: leave Recipe::groups empty");
    client_ = std::make_unique<ClientOptimizer>(recipe.optimizer, specs);
    groups_ = client_->groups();
  } else {
    const optim::OptimizerOptions optimizer = configured_optimizer(config);
    groups_ = group_params(recipe.groups, optimizer, whole, specs);
    if (!optim::has_kernel(optimizer.rule))
      client_ = std::make_unique<ClientOptimizer>(*optimizer.type, groups_, specs);
  }
  for (const optim::GroupOptions& group : groups_)
    base_lrs_.push_back(group.lr);
  if (schedule_) optim::check(*schedule_, groups_.size());
}

void Session::read_checkpoint_section(const Config& config) {
  const auto& section = config.checkpoint;
  save_options_.asynchronous = section.asynchronous;
  save_options_.keep_last = static_cast<int>(section.keep_last);
  using Tags = engine::SaveOptions::Tags;
  save_options_.tags = section.tag_validation == config::TagValidation::Fail   ? Tags::Fail
                       : section.tag_validation == config::TagValidation::Warn ? Tags::Warn
                                                                               : Tags::Ignore;
  if (section.format == config::CheckpointFormat::DeepSpeed) {
    save_options_.deepspeed = {static_cast<int>(config.zero_optimization.stage), 1};
    config_text_ = config::Value(config.to_dict()).text();
  }
  if (section.load_universal) load_from_.latest = "latest_universal";
  loads_masters_ = config.zero_optimization.load_from_fp32_weights;
  keeps_random_ = section.random_state;
}

void Session::warn(const std::vector<std::string>& warnings) {
  for (const std::string& line : logs_ ? warnings : std::vector<std::string>())
    TORCH_WARN(line);
  note(warnings);
}

void Session::note(const std::vector<std::string>& warnings) {
  for (const std::string& line : logs_ ? warnings : std::vector<std::string>()) {
    warnings_.emplace_back(line, core_ == nullptr ? 0 : core_->global_samples());
    for (const auto& writer : writers_)
      writer->warn(line, warnings_.back().second);
  }
}

void Session::warn_of_region() {
  warn(
      {"[engine] forward runs without autocast: its configuration does not enable torch_autocast, so the autocast "
       "region around it is switched off inside"});
}

void Session::warn_of_cuts() {
  const int ranks = live().mesh().size(comm::Axis::Tp);
  const auto cut = [](const engine::ParamSpec& spec) { return spec.varies.has(comm::Axis::Tp); };
  if (ranks == 1 || std::ranges::any_of(live().params(), cut)) return;
  warn({c10::str(
      "[initialize] the mesh has ", ranks,
      " ranks along 'tp' (tensor_parallel.autotp_size), and no module of the model is cut over them: all train "
      "the same whole model; build it of the layers in tessera/nn/parallel.h, or leave the ranks to data "
      "parallelism")});
}

void Session::warn_of_frozen() {
  const auto trains = [](const engine::ParamSpec& spec) { return spec.group >= 0; };
  if (std::ranges::any_of(live().params(), trains)) return;
  warn({c10::str("[initialize] nothing is trained: ",
                 live().params().empty() ? "the model has no parameters" : "all parameters of the model are frozen",
                 ": until something is, this engine only evaluates")});
}

int Session::add_param_group(const std::vector<at::Tensor>& params, const optim::GroupOptions& options) {
  const auto call = live().enter("add_param_group");
  TESSERA_CHECK(client_ == nullptr, "engine.add_param_group",
                "the engine has an optimizer that updates by itself, whose groups are its own");
  TESSERA_CHECK_VALUE(!params.empty(), "engine.add_param_group", "the param group has no parameters");
  const int group = static_cast<int>(live().groups().size());
  const auto named = module_->named_parameters();
  std::vector<engine::ParamSpec> added;
  std::vector<int> known;
  for (const at::Tensor& param : params) {
    const auto name = std::ranges::find_if(named, [&](const auto& item) { return item.value().is_same(param); });
    TESSERA_CHECK_VALUE(name != named.end(), "engine.add_param_group", "a tensor of shape ", param.sizes(),
                        " is no parameter of the module");
    const auto& specs = live().params();
    const auto found = std::ranges::find_if(specs, [&](const auto& spec) { return spec.tensor.is_same(param); });
    if (found == specs.end()) {
      added.push_back({.name = name->key(), .tensor = param, .unit = zero::kRootUnit, .joins = group});
      continue;
    }
    const int present = found->group >= 0 ? found->group : found->joins;
    TESSERA_CHECK_VALUE(present < 0, "engine.add_param_group", "'", name->key(), "' is in param group ", present,
                        " already: change the rates of that one");
    known.push_back(static_cast<int>(found - specs.begin()));
  }
  live().check_addition({options}, added, known);
  live().add_group(options);
  for (const engine::ParamSpec& spec : added)
    live().add_param(spec);
  for (const int id : known)
    live().set_joins(id, group);
  if (!added.empty()) rest_ = connect_scopes(*module_, core_, leaves_);
  return group;
}

void Session::register_external_parameter(const torch::nn::Module& reader, const ParamKey& param) {
  const int number = states().number(param);
  const ScopeHandle* scope = nullptr;
  bool found = false;
  // Parents come before their children, so the last one found is the nearest module around the reader that a forward passes.
  std::string path;
  const auto parts = module_->named_modules();
  for (const auto& item : parts)
    if (item.value().get() == &reader) path = item.key(), found = true;
  TESSERA_CHECK_VALUE(found, "engine.register_external_parameter", "the reader, a ", reader.name(),
                      ", is no module of this engine's model");
  for (const auto& item : parts) {
    const bool around = item.key().empty() || path == item.key() || path.starts_with(item.key() + ".");
    if (const auto* holder = dynamic_cast<const ScopeHolder*>(item.value().get());
        around && holder != nullptr && !holder->scope().engine.expired())
      scope = &holder->scope();
  }
  const int module = scope != nullptr ? scope->module : rest_.module;
  if (module >= 0) live().modules().register_external(module, number);
}

at::Tensor Session::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  return live().backward(loss, retain_graph, scale_wrt_gas);
}

bool Session::step(std::optional<double> global_norm) {
  const int64_t steps = live().global_steps();
  if (const auto error = std::exchange(*held_error_, nullptr)) std::rethrow_exception(error);
  const bool boundary = !live().options().managed_accumulation || live().is_gradient_accumulation_boundary();
  std::function<void()> update;
  if (client_ != nullptr) {
    client_->publish(*core_);
    update = [this] { client_->run(*core_); };
  }
  const bool applied = noting([&] { return live().step(update, global_norm, boundary ? fault() : ""); });
  warn_of_step();
  if (applied) {
    ++schedule_steps_;
    apply_schedule();
  }
  if (live().global_steps() != steps) report_step();
  return applied;
}

Session::Held::Held(engine::Engine& core, Error error, Call begin, Call end, Call leave)
    : core_(core), error_(std::move(error)), end_(end), leave_(leave) {
  if (begin != nullptr) (core_.*begin)();
}

Session::Held Session::states_away(const std::vector<zero::StateKind>& kinds, shard::Residence to, bool pin_memory) {
  offload_states(kinds, to, pin_memory);
  return {live(), held_error_, nullptr, &engine::Engine::reload_states, &engine::Engine::reload_states};
}

void Session::Held::end() {
  if (const auto end = std::exchange(end_, nullptr)) (core_.*end)();
}

Session::Held::~Held() {
  if (end_ != nullptr && std::uncaught_exceptions() != passing_) end_ = leave_;
  try {
    end();
  } catch (const std::exception&) {
    *error_ = std::current_exception();
  }
}

at::Tensor Session::sum(const at::Tensor& value) const {
  live().check_one_thread("sum");
  return comm::sum_over_batch(live().mesh(), value);
}

at::Tensor Session::mean(const at::Tensor& value) const {
  live().check_one_thread("mean");
  return comm::mean_over_batch(live().mesh(), value);
}

at::Tensor Session::token_mean(const at::Tensor& sum, const at::Tensor& count) const {
  live().check_one_thread("token_mean");
  return comm::token_mean(live().mesh(), sum, count);
}

void Session::warn_of_step() {
  warn(live().take_notices());
  if (checks_sequence_ == SequenceCheck::Off || !live().was_step_applied()) return;
  const std::string fault = sequence_fault();
  // An update in the backward came before the fault could be seen: the next update is refused.
  if (checks_sequence_ == SequenceCheck::Error && !fault.empty()) return;
  if (live().mesh().rank(comm::Axis::Sp) == 0 && !fault.empty()) warn({"[engine.step] " + fault});
  checks_sequence_ = SequenceCheck::Off;
}

std::string Session::sequence_fault() const {
  const comm::GroupPtr sequence = live().mesh().group(comm::Axis::Sp);
  if (sequence->stats().all_to_all.calls > 0) return "";
  return c10::str(
      "the mesh has ", sequence->size(),
      " ranks along 'sp' (sequence_parallel_size), and no attention of the model has exchanged parts of a "
      "sequence over mesh.group(Axis::Sp): an attention needs parallel::SequenceAttention; where each part "
      "is treated alone, Recipe::parts_alone says so; without a cut sequence the ranks train the same twice");
}

void Session::on_metric(OnMetric call) {
  live();
  if (!logs_) return;
  watch_.listen(live());
  calls_.push_back(std::move(call));
}

void Session::add_writer(std::unique_ptr<io::MetricWriter> writer) {
  live();
  if (!logs_) return;
  watch_.listen(live());
  for (const auto& [text, samples] : warnings_)
    writer->warn(text, samples);
  writers_.push_back(std::move(writer));
}

void Session::write_metrics(const std::vector<io::Metric>& metrics) {
  live();
  for (const auto& writer : writers_)
    writer->write(metrics);
  for (const OnMetric& call : calls_)
    for (const io::Metric& metric : metrics)
      call(metric.name, metric.value, metric.step);
}

std::vector<engine::CallRow> Session::comm_summary(bool stragglers) {
  TESSERA_CHECK(watch_.calls() != nullptr, "engine.comm_summary",
                "collectives are not timed: set comms_logger.enabled to true");
  return engine::call_rows(*watch_.calls(), live(), stragglers);
}

void Session::report_step() {
  const engine::Watch::Report report = watch_.stepped(live(), lr());
  if (!logs_) return;
  for (const std::string& line : report.lines)
    watch_.line().say("[tessera] " + line);
  if (!report.progress.empty()) watch_.line().show("[tessera] " + report.progress);
  if (logs_memory_ && live().global_steps() % steps_per_print_ == 0)
    watch_.line().say("[tessera] memory (MB) | " + engine::text_of(live().memory()));
  write_metrics(report.metrics);
}

// The other names of tied parameters, by the name that the engine has for each.
std::map<std::string, std::vector<std::string>> Session::aliases() const {
  std::map<const void*, std::string> own;
  for (const auto& spec : live().params())
    own[spec.tensor.unsafeGetTensorImpl()] = spec.name;
  std::map<std::string, std::vector<std::string>> aliases;
  for (const auto& item : module_->named_parameters())
    if (const std::string& name = own[item.value().unsafeGetTensorImpl()]; !name.empty() && name != item.key())
      aliases[name].push_back(item.key());
  return aliases;
}

bool Session::save_16bit_model(const std::string& dir, const std::string& name, const ExportOptions& options) {
  const auto call = live().enter("save_16bit_model");
  if (!gathers_for_export_) return false;
  check_contents("save_16bit_model");
  const auto aliases = this->aliases();
  std::vector<engine::LiveTensor> tensors;
  for (int id = 0; id < static_cast<int>(live().params().size()); ++id) {
    const engine::ParamSpec& spec = live().params()[id];
    if (spec.group < 0 && !options.frozen) continue;
    tensors.push_back({{spec.name}, id});
    if (const auto found = aliases.find(spec.name); found != aliases.end())
      tensors.back().names.insert(tensors.back().names.end(), found->second.begin(), found->second.end());
  }
  for (const auto& buffer : module_->named_buffers())
    tensors.push_back({{buffer.key()}, -1, buffer.value()});
  engine::export_weights(*core_, tensors, dir, name, options.max_shard_bytes);
  return true;
}

void Session::look_before_update() {
  for (auto& [param, note] : cuts_)
    keep_cut(param, note);
  if (live().options().zero.update_in_backward && c10::GradMode::is_enabled()) live().set_fault(fault());
}

std::string Session::fault() {
  const engine::ContentsReport report = contents_->report(live().params());
  if (!report.warning.empty() && !std::exchange(warned_of_frozen_, true)) warn({report.warning});
  const bool looks = checks_sequence_ == SequenceCheck::Error && report.fault.empty() && live().backwards() > 0;
  return looks ? sequence_fault() : report.fault;
}

// Throws on all ranks alike.
void Session::check_contents(const char* call) {
  const std::string wrong = fault();
  live().checkpoints().on_all([&] {
    if (!wrong.empty()) TESSERA_FAIL(UsageError, "[engine.", call, "] ", wrong);
    live().check_groups(call);
  });
}

std::string Session::save_checkpoint(const std::string& dir, std::optional<engine::SaveOptions> options,
                                     const ClientValues& client) {
  const auto call = live().enter("save_checkpoint");
  check_contents("save_checkpoint");
  engine::SaveOptions chosen = options.value_or(save_options_);
  if (save_options_.deepspeed)
    chosen.deepspeed = {save_options_.deepspeed->stage, live().mesh().size(comm::kBatchAxes)};
  engine::ClientPart part;
  live().checkpoints().on_all([&] {
    for (const auto& [name, value] : client)
      TESSERA_CHECK_VALUE(!chosen.deepspeed || !checkpoint::deepspeed::is_own_key(name), "engine.save_checkpoint",
                          "the program's values have a key that is DeepSpeed's own: ", name);
    part = client_part(client);
  });
  if (chosen.tags == engine::SaveOptions::Tags::Ignore) chosen.tags = save_options_.tags;
  return noting([&] { return live().checkpoints().save(dir, chosen, std::move(part)); });
}

// The names of parameters by group of the optimizer.
std::vector<std::vector<std::string>> Session::trained_names() const {
  const auto groups = client_ != nullptr ? client_->names(*core_) : engine::names_by_group(*core_);
  std::vector<std::vector<std::string>> names(groups.size());
  for (size_t number = 0; number < groups.size(); ++number)
    for (const auto& [name, is_trained] : groups[number])
      if (is_trained) names[number].push_back(name);
  return names;
}

engine::ClientPart Session::client_part(const ClientValues& client) const {
  const std::string place = std::to_string(live().checkpoints().place());
  engine::ClientPart part;
  part.aliases = aliases();
  nlohmann::json run{{"schedule_steps", schedule_steps_}};
  if (own_schedule_ != nullptr) run["own_schedule"] = own_schedule_->state();
  part.run = run.dump();
  for (const auto& buffer : module_->named_buffers())
    part.tensors.push_back({buffer.key(), "buffer", buffer.value()});
  if (client_ != nullptr) {
    part.states = client_->states(*core_);
    part.blobs["optimizer-" + place] = checkpoint::to_torch_file(client_->numbers(*core_), "the optimizer's state");
  }
  if (keeps_random_)
    part.blobs["random-" + place] = checkpoint::to_torch_file(random_states(device()), "the random generators");
  if (place == "0" && save_options_.deepspeed)
    part.blobs["python"] = checkpoint::deepspeed::run_blob(config_text_, trained_names());
  if (place == "0") part.blobs["client_state"] = checkpoint::to_torch_file(dict_of(client), "client_state");
  return part;
}

// Pairs each buffer with the value that it shall have.
std::vector<std::pair<at::Tensor, at::Tensor>> Session::buffers_of(const engine::Restore& found, bool strict) const {
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  std::string problems;
  for (const auto& buffer : module_->named_buffers()) {
    const at::Tensor value = found.buffer(buffer.key()), here = buffer.value();
    if (!value.defined() && strict) problems += c10::str("\n  not in the checkpoint: '", buffer.key(), "'");
    if (!value.defined()) continue;
    if (value.sizes() == here.sizes())
      buffers.emplace_back(here, value);
    else
      problems += c10::str("\n  '", buffer.key(), "' has shape ", value.sizes(), " there and ", here.sizes(), " here");
  }
  TESSERA_CHECK_VALUE(problems.empty(), "checkpoint", "buffers of '", found.folder(),
                      "' do not fit this model:", problems);
  return buffers;
}

Loaded Session::load_checkpoint(const std::string& dir, const std::string& tag, const engine::Restore::Options& given) {
  const auto call = live().enter("load_checkpoint");
  check_contents("load_checkpoint");
  engine::Restore::Options options = given;
  options.from_master = options.from_master && loads_masters_;
  engine::Foreign from = load_from_;
  if (client_ != nullptr) from.groups = client_->names(*core_);
  auto found = noting([&] { return live().checkpoints().open(dir, tag, options, from); });
  if (!found) return {};
  Loaded loaded{found->folder(), found->tag(), found->missing(), found->unexpected()};
  const SavedValues saved(*found, live().checkpoints().place());
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  nlohmann::json run;
  std::string states, present;
  // Every check that can refuse the checkpoint comes before anything changes, on any rank.
  live().checkpoints().on_all([&] {
    buffers = buffers_of(*found, options.strict);
    run = nlohmann::json::parse(found->client_run());
    loaded.client = saved.client();
    if (options.run) saved.try_random(device());
    if (client_ != nullptr && options.optimizer) states = client_->saved(*core_, *found);
    if (!states.empty()) {
      present = client_->present();
      client_->try_load(states, present);
    }
  });
  noting([&] { return found->apply(), true; });
  if (client_ != nullptr) client_->keep_options(*core_);
  if (!states.empty()) client_->load(states);
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, value] : buffers)
    buffer.copy_(value);
  if (!options.run) return loaded;
  schedule_steps_ = run.value("schedule_steps", int64_t{0});
  if (own_schedule_ != nullptr && run.contains("own_schedule")) own_schedule_->load_state(run["own_schedule"]);
  if (client_ != nullptr) put_rates(lr());
  apply_schedule();
  saved.put_random(device());
  return loaded;
}

void Session::destroy() {
  live().destroy();
  if (client_ != nullptr) client_->release();
}

std::vector<double> Session::lr() const {
  std::vector<double> rates;
  for (const auto& group : live().groups())
    rates.push_back(group.lr);
  return rates;
}

void Session::put_rates(const std::vector<double>& rates) {
  for (size_t i = 0; i < rates.size(); ++i) {  // a group that was added later keeps its rate
    live().groups()[i].lr = rates[i];
    if (client_ != nullptr) client_->set_rate(i, rates[i]);
  }
}

void Session::apply_schedule() {
  if (own_schedule_ != nullptr) {
    const std::vector<double> rates = own_schedule_->rates(schedule_steps_, base_lrs_);
    TESSERA_CHECK_VALUE(rates.size() == base_lrs_.size(), "schedule", "the schedule gives ", rates.size(),
                        " rates for ", base_lrs_.size(), " param groups");
    for (const double rate : rates)
      TESSERA_CHECK_VALUE(std::isfinite(rate) && rate >= 0, "schedule", "the schedule gives the rate ", rate, " after ",
                          schedule_steps_, " updates");
    put_rates(rates);
  }
  if (!schedule_) return;
  const auto values = optim::evaluate(*schedule_, schedule_steps_, base_lrs_);
  put_rates(values.lr);
  const auto rule = live().options().rule;
  const bool has_betas = rule == optim::Rule::Adam || rule == optim::Rule::Lion || (client_ && client_->has_betas());
  if (!has_betas || values.momentum.empty()) return;
  for (size_t i = 0; i < values.lr.size(); ++i)
    live().groups()[i].beta1 = values.momentum[i];
}

}  // namespace tessera::nn

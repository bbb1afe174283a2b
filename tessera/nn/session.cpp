#include "tessera/nn/session.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/averages.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"
#include "tessera/engine/build.h"
#include "tessera/engine/inputs.h"
#include "tessera/engine/notices.h"
#include "tessera/nn/cut_layers.h"
#include "tessera/nn/cut_model.h"
#include "tessera/nn/optimizers.h"
#include "tessera/nn/parallel.h"
#include "tessera/nn/sequence_layers.h"
#include "tessera/optim/advice.h"
#include "tessera/parallel/sequence_regions.h"

namespace tessera::nn {

namespace {

optim::OptimizerOptions configured_optimizer(const Config& config) {
  const std::string& type = config.optimizer.type;
  config::refuse_class(type);
  auto found = config::native_optimizer(config);
  if (!found) found = config::torch_optimizer(config);
  TESSERA_CHECK_VALUE(found, "initialize", "the configuration names no optimizer that runs in C++",
                      config::where_optimizer_runs(type), "; set optimizer.type to one of ", optim::cpp_types(),
                      ", or give Recipe::optimizer one of torch::optim, or of your own");
  return *found;
}

// Adds the modules of `model`, which is the outline of `module`, that the rule takes.
void add_leaves(const torch::nn::Module& module, const engine::Outline& model, const LeafRule& rule,
                std::vector<int>& modules) {
  std::map<std::string, const torch::nn::Module*> parts{{"", &module}};
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    parts.emplace(item.key(), item.value().get());
  for (size_t i = 0; i < model.modules.size(); ++i)
    if (rule(model.modules[i].path, *parts.at(model.modules[i].path))) modules.push_back(static_cast<int>(i));
  std::ranges::sort(modules);
  modules.erase(std::ranges::unique(modules).begin(), modules.end());
}

}  // namespace

comm::Mesh environment_mesh(const Config& config) {
  return comm::environment_mesh(static_cast<int>(config.zero_optimization.mics_shard_size),
                                static_cast<int>(config.sequence_parallel_size),
                                static_cast<int>(std::max<int64_t>(1, config.tensor_parallel.autotp_size)));
}

Session::Session(std::shared_ptr<torch::nn::Module> module, const Config& config, comm::Mesh mesh,
                 const Construction* building, const Recipe& recipe, Part part)
    : module_(std::move(module)), watch_(config), logs_(part != Part::Other && mesh.rank(comm::kAxes) == 0) {
  TESSERA_CHECK_VALUE(module_ != nullptr, "initialize", "the module is null");
  config.validate();
  // What only a mesh can give is never left out silently.
  comm::check_sizes(mesh, config.sequence_parallel_size, config.tensor_parallel.autotp_size);
  warn(config::check_cpp_serves(config));
  if (watch_.calls() != nullptr) mesh = comm::timed_mesh(mesh, watch_.calls());
  gathers_for_export_ =
      !config::placements(config).shards_params() || config.zero_optimization.stage3_gather_16bit_weights_on_model_save;
  drops_last_ = config.dataloader_drop_last;
  read_checkpoint_section(config);
  auto options = engine::options_from(config, mesh.size(comm::kBatchAxes));
  casts_inputs_ = config.fp16.enabled && config.fp16.auto_cast;
  engine::UnitNames units = recipe.units ? recipe.units(*module_) : default_unit_policy(*module_);
  if (config::placements(config).shards_params()) {
    const engine::Outline model = outline(*module_);
    engine::Leaves marked = engine::configured_leaves(model, config.zero_optimization);
    warn(marked.warnings);
    if (recipe.leaf) add_leaves(*module_, model, recipe.leaf, marked.modules);
    leaves_ = engine::outermost(model, marked.modules);
    units = engine::partition_units(model, units, leaves_);
  }
  plan_ = cut_model(*module_, config, mesh.group(comm::Axis::Tp), building, recipe.facts);
  if (plan_) warn(plan_->warnings);
  for (const at::Tensor& param : module_->parameters())
    if (const CutParamPtr note = cut_note(param); note != nullptr) cuts_.emplace_back(param, note);
  if (config.tessera.sequence_parallel_norms && cuts_.empty()) warn({parallel::kNoRegions});
  auto specs = param_specs(*module_, units);
  prepare_optimizer(config, recipe, part == Part::Whole, specs, options);
  if (evaluates_) options.rule = optim::Rule::External;
  if (client_ != nullptr) {
    options.rule = optim::Rule::External;
    options.client_type = client_->type();
    options.client_optimizer = client_->description();
    const bool is_cut = std::ranges::any_of(specs, [](const auto& spec) { return spec.cut != nullptr; });
    if (made_ == nullptr) client_->check_cut(config, is_cut);
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
  if (recipe.optimizer != nullptr) own_ = std::make_unique<OwnGroups>(recipe.optimizer);
  if (config::placements(config).shards_params() && live().mesh().size(comm::kStateAxes) > 1)
    sequences_ = std::make_shared<GatheredSequences>(module_, leaves_);
  rest_ = connect_scopes(*module_, core_, leaves_);
  contents_ = std::make_unique<Contents>(module_);
  const bool is_16bit = live().options().zero.precision.param != at::kFloat;
  const auto kept = config.data_types.keep_in_fp32_modules.value_or(std::vector<std::string>());
  cast_buffers(*module_, config.data_types.buffer_dtype, is_16bit ? kept : std::vector<std::string>());
  apply_schedule();
  warn_of_betas();
  give_options();
  watch_.attach(live(), logs_);
  if (!logs_) return;
  for (const std::string& line : watch_.first_lines(live()))
    watch_.line().say("[tessera] " + line);
  for (auto& writer : engine::metric_writers(config))
    add_writer(std::move(writer));
}

// Settles the param groups, and who updates them by which rates.
void Session::prepare_optimizer(const Config& config, const Recipe& recipe, bool whole,
                                std::vector<engine::ParamSpec>& specs, engine::Options& options) {
  own_schedule_ = recipe.schedule;
  if (own_schedule_ == nullptr) schedule_ = config::native_schedule(config);
  TESSERA_CHECK_VALUE(schedule_ || own_schedule_ || config.scheduler.type.empty(), "initialize",
                      "the configuration names no schedule that runs in C++",
                      config::where_schedule_runs(config.scheduler.type), "; set scheduler.type to one of ",
                      config::cpp_schedules(), ", or give Recipe::schedule one of your own");
  if (recipe.optimizer != nullptr) {
    TESSERA_CHECK_VALUE(recipe.groups.empty(), "initialize",
                        "an optimizer of one's own has its groups already: leave Recipe::groups empty");
    take_optimizer(recipe.optimizer, specs, options);
  } else if (config.optimizer.type.empty()) {
    config::check_without_optimizer(config);
    TESSERA_CHECK_VALUE(recipe.groups.empty(), "initialize",
                        "Recipe::groups has groups, and there is no optimizer for them: set optimizer.type, or leave "
                        "the groups empty in an engine that only evaluates");
    evaluates_ = true;
    for (engine::ParamSpec& spec : specs)
      spec.group = spec.joins = -1;
  } else {
    const optim::OptimizerOptions optimizer = configured_optimizer(config);
    groups_ = group_params(recipe.groups, optimizer, whole, specs);
    if (schedule_)  // momentum needs memory
      optim::put_momenta(*optimizer.type, *schedule_,
                         optim::evaluate(*schedule_, 0, std::vector<double>(groups_.size())).momentum, groups_);
    if (!optim::has_kernel(optimizer.rule))
      client_ = std::make_unique<ClientOptimizer>(*optimizer.type, groups_, specs);
  }
  for (const optim::GroupOptions& group : groups_)
    base_lrs_.push_back(group.lr);
  if (evaluates_) schedule_.reset(), own_schedule_ = nullptr;
  if (schedule_) optim::check(*schedule_, groups_.size());
}

void Session::warn_of_betas() {
  if (!schedule_) return;
  const optim::Type* const type = client_ ? client_->type() : &optim::type_of(live().options().rule);
  const auto is_betas = [](const optim::Field& field) { return field.name == std::string_view("betas"); };
  const bool has_betas = type != nullptr ? std::ranges::any_of(type->fields, is_betas) : client_->has_betas();
  const std::string text = optim::warn_of_betas(*schedule_, has_betas, type != nullptr ? type->name : client_->name());
  if (!text.empty()) warn({text});
}

// An optimizer of make_optimizer() says which rule runs on what; any other one updates by itself.
void Session::take_optimizer(const std::shared_ptr<torch::optim::Optimizer>& optimizer,
                             std::vector<engine::ParamSpec>& specs, engine::Options& options) {
  const auto made = made_optimizer(*optimizer);
  if (!made) {
    client_ = std::make_unique<ClientOptimizer>(optimizer, specs);
    groups_ = client_->groups();
    return;
  }
  if (made->stochastic_rounding) config::refuse_rounding(made->type->name);
  mark_groups(*optimizer, specs);
  made_ = optimizer;
  groups_ = made->groups;
  options.rule = made->type->rule;
  if (!optim::has_kernel(options.rule)) client_ = std::make_unique<ClientOptimizer>(*made->type, groups_, specs);
}

std::string Session::pass_on_options() {
  auto& groups = live().groups();
  for (size_t i = 0; own_ != nullptr && i < std::min(given_.size(), groups.size()); ++i) {
    if (groups[i] == given_[i]) continue;
    if (made_ != nullptr) {
      group_options(made_->param_groups().at(i)) = groups[i];
      continue;
    }
    optim::GroupOptions other = groups[i];
    other.lr = given_[i].lr;
    client_->set_rate(i, groups[i].lr);
    groups[i] = given_[i];
    if (other != given_[i])
      return c10::str("engine.groups()[", i, "] is of a ", client_->name(),
                      " of the program's own, whose options are in its param groups: change there what is not lr");
  }
  return "";
}

void Session::take_options() {
  if (made_ != nullptr) {
    const std::vector<optim::GroupOptions> groups = made_optimizer(*made_)->groups;
    std::copy_n(groups.begin(), std::min(groups.size(), live().groups().size()), live().groups().begin());
  }
  if (client_ != nullptr) client_->publish(*core_);
  given_ = live().groups();
}

void Session::give_options() {
  for (size_t i = 0; made_ != nullptr && i < made_->param_groups().size(); ++i)
    group_options(made_->param_groups()[i]) = live().groups().at(i);
  given_ = live().groups();
}

engine::Engine& Session::trained_by(const char* call) const {
  live().check_live(call);
  if (evaluates_)
    TESSERA_FAIL(UsageError, "[engine.", call,
                 "] there is no optimizer; set optimizer.type, or give Recipe::optimizer");
  return *core_;
}

int Session::add_param_group(const std::vector<at::Tensor>& params, const optim::GroupOptions& options) {
  const auto call = trained_by("add_param_group").enter("add_param_group");
  TESSERA_CHECK_VALUE(!params.empty(), "engine.add_param_group", "the param group has no parameters");
  return add_group(params, options);
}

int Session::add_group(const std::vector<at::Tensor>& params, const optim::GroupOptions& options) {
  const int group = static_cast<int>(live().groups().size());
  if (made_ != nullptr) {  // which has it first, as where the program adds it there
    follow_groups();
    made_->add_param_group(torch::optim::OptimizerParamGroup(params));
    group_options(made_->param_groups().back()) = options;
    follow_groups();
    return group;
  }
  TESSERA_CHECK(client_ == nullptr || client_->type() != nullptr, "engine.add_param_group",
                "the engine's optimizer is a ", client_->name(),
                " of the program's own, with options of its own: call its add_param_group() in place of the engine's, "
                "which follows");
  grow({options}, {{group, params}});
  return group;
}

void Session::follow_groups() {
  if (own_ == nullptr) return;
  const std::vector<OwnGroups::Added> added = own_->added();
  if (added.empty()) return;
  try {
    const size_t present = live().groups().size();
    std::vector<optim::GroupOptions> options;
    if (made_ == nullptr) {
      const auto all = client_->groups();
      options.assign(all.begin() + static_cast<std::ptrdiff_t>(present), all.end());
    } else {
      for (size_t number = present; number < made_->param_groups().size(); ++number)
        options.push_back(group_options(made_->param_groups()[number]));
    }
    grow(options, added);
  } catch (c10::Error& error) {
    own_->take_back();
    error.add_context("what was added to the optimizer's param groups is out of them again");
    throw;
  }
  own_->note();
}

void Session::take_joined() {
  if (client_ == nullptr) return;
  client_->take_joined(*core_);
  if (own_ != nullptr) own_->note();
}

// The parameters join with the next step, save or load. Nothing is changed where one is refused.
void Session::grow(const std::vector<optim::GroupOptions>& options, const std::vector<OwnGroups::Added>& groups) {
  std::vector<engine::ParamSpec> added, all;
  std::vector<std::pair<int, int>> known;  // by number, with the group
  const auto named = module_->named_parameters();
  const auto& specs = live().params();
  for (const auto& [group, params] : groups)
    for (const at::Tensor& param : params) {
      const auto name = std::ranges::find_if(named, [&](const auto& item) { return item.value().is_same(param); });
      TESSERA_CHECK_VALUE(name != named.end(), "engine", "a tensor of shape ", param.sizes(),
                          " is no parameter of the module: ", kRegisterBeside);
      engine::ParamSpec spec{.name = name->key(), .tensor = param, .unit = zero::kRootUnit, .joins = group};
      const auto found = std::ranges::find_if(specs, [&](const auto& one) { return one.tensor.is_same(param); });
      int present = found == specs.end() ? -1 : std::max(found->group, found->joins);
      for (const engine::ParamSpec& other : all)
        if (other.tensor.is_same(param)) present = other.joins;
      TESSERA_CHECK_VALUE(present < 0, "engine", "'", name->key(), "' is in param group ", present,
                          " already: change the rates of that one");
      all.push_back(spec);
      if (found == specs.end())
        added.push_back(std::move(spec));
      else
        known.emplace_back(static_cast<int>(found - specs.begin()), group);
    }
  std::vector<int> ids;
  std::ranges::transform(known, std::back_inserter(ids), [](const auto& one) { return one.first; });
  live().check_addition(options, added, ids);
  if (client_ != nullptr) client_->check_added(options, all);
  for (const optim::GroupOptions& group : options) {
    live().add_group(group);
    if (client_ != nullptr) client_->add_group(group);
  }
  for (const engine::ParamSpec& spec : added)
    live().add_param(spec);
  for (const auto& [id, group] : known)
    live().set_joins(id, group);
  for (const auto& [group, params] : groups)
    if (client_ != nullptr) client_->take_added(group, params);
  if (added.empty()) return;
  if (sequences_ != nullptr) sequences_->wrap();
  rest_ = connect_scopes(*module_, core_, leaves_);
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
  live().check_one_thread("register_external_parameter");
  const int module = scope != nullptr ? scope->module : rest_.module;
  if (module >= 0) live().modules().register_external(module, number);
}

at::Tensor Session::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  return trained_by("backward").backward(loss, retain_graph, scale_wrt_gas);
}

bool Session::step(std::optional<double> global_norm) {
  const int64_t steps = trained_by("step").global_steps();
  live().held_error().rethrow();
  const bool boundary = !live().options().managed_accumulation || live().is_gradient_accumulation_boundary();
  std::string wrong;
  std::function<void()> update;
  if (boundary) {
    wrong = fault();  // follows groups, too
    const std::string options = pass_on_options();
    if (wrong.empty()) wrong = options;
    take_options();
  }
  if (client_ != nullptr) {
    update = [this] {
      take_joined();
      client_->run(*core_);
    };
  }
  const bool applied = noting([&] { return live().step(update, global_norm, wrong); });
  warn_of_step();
  if (applied) {
    ++schedule_steps_;
    apply_schedule();
    give_options();
  }
  if (live().global_steps() != steps) report_step();
  return applied;
}

Session::Held::Held(std::shared_ptr<engine::Engine> core, Call begin, Call end, Call leave)
    : core_(std::move(core)), end_(end), leave_(leave) {
  if (begin != nullptr) ((*core_).*begin)();
}

Session::Held Session::states_away(const std::vector<zero::StateKind>& kinds, shard::Residence to, bool pin_memory) {
  offload_states(kinds, to, pin_memory);
  return {owned(), nullptr, &engine::Engine::reload_states, &engine::Engine::reload_states};
}

void Session::Held::end() {
  if (const auto end = std::exchange(end_, nullptr)) ((*core_).*end)();
}

Session::Held::~Held() {
  if (end_ != nullptr && std::uncaught_exceptions() != passing_) end_ = leave_;
  try {
    end();
  } catch (const std::exception&) {
    core_->held_error().hold();
  }
}

at::ScalarType Session::dtype() const {
  for (const engine::ParamSpec& spec : live().params())
    if (spec.tensor.is_floating_point()) return spec.tensor.scalar_type();
  return live().options().zero.precision.param;
}

at::Tensor Session::cast_inputs(const at::Tensor& input) const {
  if (!input.defined()) return input;
  return input.is_floating_point() ? input.to(device(), dtype()) : input.to(device());
}
std::vector<at::Tensor> Session::cast_inputs(std::vector<at::Tensor> inputs) const {
  for (at::Tensor& input : inputs)
    input = cast_inputs(input);
  return inputs;
}

at::Tensor Session::cast_input(const at::Tensor& input) const {
  if (casts_and_moves_) return cast_inputs(input);
  return input.defined() && input.is_floating_point() ? input.to(at::kHalf) : input;
}
std::vector<at::Tensor> Session::cast_input(std::vector<at::Tensor> inputs) const {
  for (at::Tensor& input : inputs)
    input = cast_input(input);
  return inputs;
}

void Session::explain(c10::Error& error, const std::vector<SeenInput>& inputs) const {
  const std::optional<at::ScalarType> own = live().params().empty() ? std::nullopt : std::optional(dtype());
  std::vector<engine::Input> named;
  for (const SeenInput& input : inputs)
    named.push_back({c10::str("[", input.argument, input.element < 0 ? "" : c10::str("][", input.element), "]"),
                     input.dtype, input.device});
  std::string line =
      engine::explain_inputs(error.what_without_backtrace(), {own, device(), live().options().autocast.enabled}, named);
  if (!line.empty()) error.add_context(std::move(line));
}

void Session::barrier() const {
  live().check_one_thread("barrier");
  live().mesh().group(comm::kAxes)->barrier();
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

void Session::look_before_update() {
  for (auto& [param, note] : cuts_)
    keep_cut(param, note);
  live().held_error().rethrow();
  follow_groups();
  warn(live().take_notices());
  if (!live().options().zero.update_in_backward || !c10::GradMode::is_enabled()) return;
  const std::string options = pass_on_options();
  take_options();
  const std::string wrong = fault();
  live().set_fault(wrong.empty() ? options : wrong);
}

std::string Session::fault() {
  try {
    follow_groups();
  } catch (const c10::Error& error) {  // which all ranks are to have
    const std::string text = error.what_without_backtrace();
    return text.starts_with("[engine] ") ? text.substr(9) : text;
  }
  const engine::ContentsReport report = contents_->report(live().params());
  if (!report.warning.empty() && !std::exchange(warned_of_frozen_, true)) warn({report.warning});
  return fault_of(report);
}

std::string Session::fault_of(const engine::ContentsReport& report) const {
  const bool looks = checks_sequence_ == SequenceCheck::Error && report.fault.empty() && live().backwards() > 0;
  return looks ? engine::sequence_fault(live().mesh()) : report.fault;
}

void Session::destroy() {
  live().destroy();
  sequences_.reset();
  own_.reset();
  if (client_ != nullptr) client_->release();
}

std::vector<double> Session::lr() const {
  live().check_live("lr");
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
  const auto values = optim::evaluate(*schedule_, schedule_steps_, base_lrs_, &schedule_at_);
  put_rates(values.lr);
  if (values.momentum.empty()) return;
  const optim::Type* const type = client_ ? client_->type() : &optim::type_of(live().options().rule);
  if (type != nullptr)
    optim::put_momenta(*type, *schedule_, values.momentum, live().groups());
  else
    client_->put_momenta(*schedule_, values.momentum);
}

}  // namespace tessera::nn

#include "tessera/nn/session.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"
#include "tessera/engine/build.h"
#include "tessera/engine/export.h"
#include "tessera/nn/cut_layers.h"
#include "tessera/nn/cut_model.h"

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

}  // namespace

comm::Mesh environment_mesh(const Config& config) {
  return comm::environment_mesh(static_cast<int>(config.zero_optimization.mics_shard_size),
                                static_cast<int>(config.sequence_parallel_size),
                                static_cast<int>(std::max<int64_t>(1, config.tensor_parallel.autotp_size)));
}

Session::Session(std::shared_ptr<torch::nn::Module> module, const Config& config, comm::Mesh mesh,
                 const Construction* building, const UnitPolicy& policy, bool logs)
    : module_(std::move(module)), logs_(logs && mesh.rank(comm::kAxes) == 0) {
  TESSERA_CHECK_VALUE(module_ != nullptr, "initialize", "the module is null");
  config.validate();
  check_axes(config, mesh);
  warn(config::check_cpp_serves(config));
  const auto optimizer = config::native_optimizer(config);
  TESSERA_CHECK_VALUE(optimizer, "initialize",
                      "the configuration names no optimizer that runs in C++; set optimizer.type to one of ",
                      optim::native_types());
  schedule_ = config::native_schedule(config);
  TESSERA_CHECK_VALUE(schedule_ || config.scheduler.type.empty(), "initialize", "scheduler.type '",
                      config.scheduler.type, "' exists in Python only");
  gathers_for_export_ =
      !config::placements(config).shards_params() || config.zero_optimization.stage3_gather_16bit_weights_on_model_save;
  steps_per_print_ = config.steps_per_print.value_or(0);
  read_checkpoint_section(config);
  auto options = engine::options_from(config, mesh.size(comm::kBatchAxes));
  const std::vector<optim::GroupOptions> groups{optimizer->defaults};
  base_lrs_ = {optimizer->defaults.lr};
  if (schedule_) {
    optim::check(*schedule_, groups.size());
  }
  TESSERA_CHECK_BUILT(!(config.fp16.enabled && config.fp16.auto_cast), "initialize",
                      "fp16.auto_cast casts inputs in Python only; cast them to at::kHalf yourself");
  engine::UnitNames units = policy(*module_);
  std::vector<std::string> leaves;
  if (config::placements(config).shards_params()) {
    const engine::Outline model = outline(*module_);
    const engine::Leaves marked = engine::configured_leaves(model, config.zero_optimization);
    warn(marked.warnings);
    leaves = engine::outermost(model, marked.modules);
    units = engine::partition_units(model, units, leaves);
  }
  plan_ = cut_model(*module_, config, mesh.group(comm::Axis::Tp), building);
  if (plan_) warn(plan_->warnings);
  for (const at::Tensor& param : module_->parameters())
    if (const CutParamPtr note = cut_note(param); note != nullptr) cuts_.emplace_back(param, note);
  auto specs = param_specs(*module_, units);
  if (options.autocast.enabled) {
    mark_autocast(*module_, config.torch_autocast.lower_precision_safe_modules.value_or(default_autocast_modules()),
                  options.autocast.dtype, specs);
  }
  checks_sequence_ = mesh.size(comm::Axis::Sp) > 1;
  if (building != nullptr) building->hand_over(specs);
  core_ = std::make_shared<engine::Engine>(options, std::move(mesh), std::move(specs), groups);
  core_->broadcast_buffers(module_->buffers());
  rest_ = connect_scopes(*module_, core_, leaves);
  contents_ = std::make_unique<Contents>(module_);
  const bool is_16bit = core_->options().zero.precision.param != at::kFloat;
  const auto kept = config.data_types.keep_in_fp32_modules.value_or(std::vector<std::string>());
  cast_buffers(*module_, config.data_types.buffer_dtype, is_16bit ? kept : std::vector<std::string>());
  apply_schedule();
}

void Session::read_checkpoint_section(const Config& config) {
  const auto& section = config.checkpoint;
  save_options_.asynchronous = section.asynchronous;
  save_options_.keep_last = static_cast<int>(section.keep_last);
  using Tags = engine::SaveOptions::Tags;
  save_options_.tags = section.tag_validation == config::TagValidation::Fail   ? Tags::Fail
                       : section.tag_validation == config::TagValidation::Warn ? Tags::Warn
                                                                               : Tags::Ignore;
  if (section.load_universal) load_from_.latest = "latest_universal";
  loads_masters_ = config.zero_optimization.load_from_fp32_weights;
}

void Session::warn(const std::vector<std::string>& warnings) const {
  for (const std::string& line : logs_ ? warnings : std::vector<std::string>())
    TORCH_WARN(line);
}

void Session::warn_of_region() const {
  warn(
      {"[engine] forward runs without autocast: its configuration does not enable torch_autocast, so the autocast "
       "region around it is switched off inside"});
}

void Session::warn_of_cuts() const {
  const int ranks = core_->mesh().size(comm::Axis::Tp);
  const auto cut = [](const engine::ParamSpec& spec) { return spec.varies.has(comm::Axis::Tp); };
  if (ranks == 1 || std::ranges::any_of(core_->params(), cut)) return;
  warn({c10::str(
      "[initialize] the mesh has ", ranks,
      " ranks along 'tp' (tensor_parallel.autotp_size), and no module of the model is cut over them: all train "
      "the same whole model; build it of the layers in tessera/nn/parallel.h, or leave the ranks to data "
      "parallelism")});
}

void Session::warn_of_frozen() const {
  const auto trains = [](const engine::ParamSpec& spec) { return spec.group >= 0; };
  if (std::ranges::any_of(core_->params(), trains)) return;
  warn({c10::str("[initialize] nothing is trained: ",
                 core_->params().empty() ? "the model has no parameters" : "all parameters of the model are frozen",
                 ": until something is, this engine only evaluates")});
}

at::Tensor Session::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  return core_->backward(loss, retain_graph, scale_wrt_gas);
}

bool Session::step(std::optional<double> global_norm) {
  const int64_t steps = core_->global_steps();
  const bool boundary = !core_->options().managed_accumulation || core_->is_gradient_accumulation_boundary();
  const bool applied = core_->step({}, global_norm, boundary ? fault() : "");
  warn_of_step();
  if (applied) {
    ++schedule_steps_;
    apply_schedule();
  }
  if (core_->global_steps() != steps) log_progress();
  return applied;
}

void Session::warn_of_step() {
  for (const std::string& line : core_->take_notices())
    TORCH_WARN(line);
  if (!checks_sequence_ || !core_->was_step_applied()) return;
  checks_sequence_ = false;
  const comm::GroupPtr sequence = core_->mesh().group(comm::Axis::Sp);
  if (sequence->rank() != 0 || sequence->stats().all_to_all.calls > 0) return;
  warn({c10::str(
      "[engine.step] the mesh has ", sequence->size(),
      " ranks along 'sp' (sequence_parallel_size), and no attention of the model has exchanged parts of a "
      "sequence over mesh.group(Axis::Sp): what is no attention may treat each part alone, an attention needs "
      "parallel::DistributedAttention; without a cut sequence the ranks train the same twice")});
}

void Session::log_progress() const {
  if (!logs_ || steps_per_print_ == 0 || core_->global_steps() % steps_per_print_ != 0) return;
  const std::string line = c10::str("[tessera] step=", core_->global_steps(), ", skipped=", core_->skipped_steps(),
                                    ", lr=", at::ArrayRef<double>(lr()), "\n");
  std::fputs(line.c_str(), stderr);
}

// Names of a tied parameter besides the one that the engine has for it, by that one.
std::map<std::string, std::vector<std::string>> Session::aliases() const {
  std::map<const void*, std::string> own;
  for (const auto& spec : core_->params())
    own[spec.tensor.unsafeGetTensorImpl()] = spec.name;
  std::map<std::string, std::vector<std::string>> aliases;
  for (const auto& item : module_->named_parameters())
    if (const std::string& name = own[item.value().unsafeGetTensorImpl()]; !name.empty() && name != item.key())
      aliases[name].push_back(item.key());
  return aliases;
}

bool Session::save_16bit_model(const std::string& dir, const std::string& name, const ExportOptions& options) {
  if (!gathers_for_export_) return false;
  check_contents("save_16bit_model");
  const auto aliases = this->aliases();
  std::vector<engine::LiveTensor> tensors;
  for (int id = 0; id < static_cast<int>(core_->params().size()); ++id) {
    const engine::ParamSpec& spec = core_->params()[id];
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
  if (core_->options().zero.update_in_backward && c10::GradMode::is_enabled()) core_->set_fault(fault());
}

std::string Session::fault() {
  const engine::ContentsReport report = contents_->report(core_->params());
  if (!report.warning.empty() && !std::exchange(warned_of_frozen_, true)) warn({report.warning});
  return report.fault;
}

// On all ranks alike.
void Session::check_contents(const char* call) {
  const std::string wrong = fault();
  core_->checkpoints().on_all([&] {
    if (!wrong.empty()) TESSERA_FAIL(UsageError, "[engine.", call, "] ", wrong);
  });
}

std::string Session::save_checkpoint(const std::string& dir, std::optional<engine::SaveOptions> options) {
  check_contents("save_checkpoint");
  engine::ClientPart part;
  part.aliases = aliases();
  part.run = nlohmann::json{{"schedule_steps", schedule_steps_}}.dump();
  for (const auto& buffer : module_->named_buffers())
    part.tensors.push_back({buffer.key(), "buffer", buffer.value()});
  engine::SaveOptions chosen = options.value_or(save_options_);
  if (chosen.tags == engine::SaveOptions::Tags::Ignore) chosen.tags = save_options_.tags;
  return core_->checkpoints().save(dir, chosen, std::move(part));
}

// Each with the value that it shall have.
std::vector<std::pair<at::Tensor, at::Tensor>> Session::buffers_of(const engine::Restore& found, bool strict) const {
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  for (const auto& buffer : module_->named_buffers()) {
    const at::Tensor value = found.buffer(buffer.key());
    TESSERA_CHECK_VALUE(value.defined() || !strict, "checkpoint", "buffer '", buffer.key(),
                        "' is not in the checkpoint");
    if (!value.defined()) continue;
    TESSERA_CHECK_VALUE(value.sizes() == buffer.value().sizes(), "checkpoint", "buffer '", buffer.key(), "' has shape ",
                        value.sizes(), " there and ", buffer.value().sizes(), " here");
    buffers.emplace_back(buffer.value(), value);
  }
  return buffers;
}

bool Session::load_checkpoint(const std::string& dir, const std::string& tag, engine::Restore::Options options) {
  check_contents("load_checkpoint");
  options.from_master = options.from_master && loads_masters_;
  std::optional<engine::Restore> found = core_->checkpoints().open(dir, tag, options, load_from_);
  if (!found) return false;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  core_->checkpoints().on_all([&] { buffers = buffers_of(*found, options.strict); });
  found->apply();
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, value] : buffers)
    buffer.copy_(value);
  if (options.run) {
    schedule_steps_ = nlohmann::json::parse(found->client_run()).value("schedule_steps", int64_t{0});
    apply_schedule();
  }
  return true;
}

std::vector<double> Session::lr() const {
  std::vector<double> rates;
  for (const auto& group : const_cast<engine::Engine&>(*core_).groups()) {
    rates.push_back(group.lr);
  }
  return rates;
}

void Session::apply_schedule() {
  if (!schedule_) {
    return;
  }
  const auto values = optim::evaluate(*schedule_, schedule_steps_, base_lrs_);
  auto& groups = core_->groups();
  const auto rule = core_->options().rule;
  const bool has_betas = rule == optim::Rule::Adam || rule == optim::Rule::Lion;
  for (size_t i = 0; i < values.lr.size(); ++i) {  // one that was added later keeps its rate
    groups[i].lr = values.lr[i];
    if (has_betas && !values.momentum.empty()) {
      groups[i].beta1 = values.momentum[i];
    }
  }
}

}  // namespace tessera::nn

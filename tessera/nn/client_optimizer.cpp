#include "tessera/nn/client_optimizer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <set>
#include <sstream>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/pieces.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/torch_file.h"
#include "tessera/config/resolve.h"
#include "tessera/engine/logical.h"
#include "tessera/engine/whole_shards.h"
#include "tessera/nn/element_optimizer.h"
#include "tessera/nn/torch_optimizer.h"

namespace tessera::nn {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

std::string class_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

double rate_of(const torch::optim::OptimizerParamGroup& group) try {
  return group.options().get_lr();
} catch (const c10::Error&) {  // the optimizer's options do not say
  return 0;
}

std::string text_of(OutputArchive& archive) {
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

InputArchive archive_from(const std::string& text) {
  InputArchive archive;
  archive.load_from(text.data(), text.size(), at::Device(at::kCPU));
  return archive;
}

// All that its options write into a checkpoint; of a program's own class, which may write none, the rate.
std::string options_text(const torch::optim::OptimizerParamGroup& group) {
  OutputArchive written;
  try {
    group.options().serialize(written);
  } catch (const c10::Error&) {
    return c10::str("lr ", rate_of(group));
  }
  InputArchive archive = archive_from(text_of(written));
  std::ostringstream text;
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    text << (text.tellp() > 0 ? ", " : "") << key << " " << value;
  }
  return text.str();
}

// Names of tensors that a checkpoint has besides those of a client's optimizer.
bool is_own_kind(const std::string& kind) {
  static const std::set<std::string> own{"weight", "master", "buffer", "rank_buffer", "gradient", "partial_gradient"};
  return own.contains(kind);
}

// Whether a state is one for its whole parameter, however many elements that has.
bool is_number(const std::string& key, const c10::IValue& value, const at::Tensor& target) {
  return !value.isTensor() || (value.toTensor().dim() == 0 && !engine::is_part(key, value.toTensor(), target));
}

void check_step(const c10::IValue& value, const std::string& what) {
  if (!value.isTensor() && !value.isInt() && !value.isDouble()) return;  // a class's own
  const at::Tensor step = value.isTensor() ? value.toTensor() : at::scalar_tensor(value.toScalar(), at::kDouble);
  const std::string wrong = engine::wrong_state("", "step", step);
  TESSERA_CHECK_IO(wrong.empty(), "checkpoint", what, " is damaged: 'step' ", wrong);
}

// Adds the numbers of a blob of numbers(), or of Python's like, by parameter and key. Optimizers of torch in C++ count integers.
void add_numbers(const std::string& blob, const std::string& what,
                 std::map<std::string, std::map<std::string, c10::IValue>>& numbers) {
  const c10::IValue all = checkpoint::from_torch_file(blob, what);
  TESSERA_CHECK_IO(all.isGenericDict(), "checkpoint", what, " is damaged: it is no table of the parameters' states");
  for (const auto& param : all.toGenericDict()) {
    TESSERA_CHECK_IO(param.key().isString() && param.value().isGenericDict(), "checkpoint", what,
                     " is damaged: there is no table of a parameter's state");
    for (const auto& item : param.value().toGenericDict()) {
      if (!item.key().isString() || item.key().toStringRef() == checkpoint::deepspeed::kCut) continue;
      const std::string& key = item.key().toStringRef();
      const c10::IValue& value = item.value();
      const bool is_count = key == "step" && value.isTensor() && value.toTensor().numel() == 1;
      if (key == "step") check_step(value, what);
      numbers[param.key().toStringRef()][key] = is_count ? c10::IValue(value.toTensor().item<int64_t>()) : value;
    }
  }
}

}  // namespace

std::vector<std::vector<at::Tensor>> mark_groups(torch::optim::Optimizer& optimizer,
                                                 std::vector<engine::ParamSpec>& specs) {
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) config::refuse_class("LBFGS");
  const auto stepped = [](const auto& state) {
    const auto* const begun = dynamic_cast<const torch::optim::AdagradParamState*>(state.second.get());
    return begun == nullptr || begun->step() > 0;
  };
  TESSERA_CHECK_VALUE(std::ranges::none_of(optimizer.state(), stepped), "initialize", class_of(optimizer),
                      " has states already; give an engine a new one, and load_checkpoint() its states");
  std::unordered_map<const void*, engine::ParamSpec*> known;
  for (engine::ParamSpec& spec : specs) {
    known.emplace(spec.tensor.unsafeGetTensorImpl(), &spec);
    spec.group = spec.joins = -1;
  }
  std::vector<std::vector<at::Tensor>> groups;
  for (size_t number = 0; number < optimizer.param_groups().size(); ++number) {
    groups.push_back(optimizer.param_groups()[number].params());
    for (const at::Tensor& param : groups.back()) {
      const auto found = known.find(param.unsafeGetTensorImpl());
      TESSERA_CHECK_VALUE(found != known.end(), "initialize", "the optimizer's param group ", number,
                          " has a tensor of shape ", param.sizes(),
                          " that is no parameter of the module: ", kRegisterBeside);
      engine::ParamSpec& spec = *found->second;
      TESSERA_CHECK_VALUE(spec.joins < 0, "initialize", "the optimizer has '", spec.name, "' twice");
      spec.joins = static_cast<int>(number);  // also of what is frozen: trained once it requires gradients
      if (param.requires_grad()) spec.group = spec.joins;
    }
  }
  return groups;
}

namespace {

void check_matrix(const optim::Type& type, const std::vector<optim::GroupOptions>& groups,
                  const engine::ParamSpec& spec) {
  const int number = std::max(spec.group, spec.joins);
  TESSERA_CHECK_VALUE(
      type.rule != optim::Rule::Muon || number < 0 || !groups[number].use_muon || spec.tensor.dim() >= 2, "initialize",
      "Muon updates matrices, and '", spec.name, "' has ", spec.tensor.dim(),
      " dimensions: put it into a group whose use_muon is false");
}

}  // namespace

ClientOptimizer::ClientOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                                 std::vector<engine::ParamSpec>& specs)
    : optimizer_(std::move(optimizer)), originals_(mark_groups(*optimizer_, specs)) {}

ClientOptimizer::ClientOptimizer(const optim::Type& type, const std::vector<optim::GroupOptions>& groups,
                                 const std::vector<engine::ParamSpec>& specs)
    : type_(&type), groups_(groups), originals_(groups.size()) {
  const optim::Rule rule = type.rule;
  for (const engine::ParamSpec& spec : specs) {
    check_matrix(type, groups, spec);
    if (spec.group >= 0) originals_[spec.group].push_back(spec.tensor);
  }
  if (rule == optim::Rule::External) {
    optimizer_ = torch_optimizer(type, groups, originals_);
    return;
  }
  auto made = std::make_shared<WholeOptimizer>(rule, groups, originals_);
  whole_ = made.get();
  optimizer_ = std::move(made);
}

void ClientOptimizer::check_cut(const config::Config& config, bool is_cut) const {
  const auto& o = *optimizer_;
  const auto& type = typeid(o);
  const bool known = type == typeid(torch::optim::Adam) || type == typeid(torch::optim::AdamW) ||
                     type == typeid(torch::optim::SGD) || type == typeid(torch::optim::Adagrad);
  if (whole_ != nullptr || known) return;
  config::refuse_slices(config, type_ == nullptr ? class_of(o) : type_->name, is_cut);
}

std::string ClientOptimizer::description() const {
  std::ostringstream text;
  if (type_ != nullptr) {
    text << type_->name;
    for (const optim::GroupOptions& group : groups_)
      text << " (" << optim::text_of(*type_, group) << ")";
    return text.str();
  }
  text << class_of(*optimizer_);
  for (const auto& group : optimizer_->param_groups())
    text << " (" << options_text(group) << ")";
  return text.str();
}

std::vector<optim::GroupOptions> ClientOptimizer::groups() const {
  std::vector<optim::GroupOptions> groups(optimizer_->param_groups().size());
  for (size_t number = 0; number < groups.size(); ++number)
    groups[number].lr = rate_of(optimizer_->param_groups()[number]);
  return groups;
}

namespace {

template <class Options>
bool put_beta(torch::optim::OptimizerOptions& of, double value) {
  auto* const options = dynamic_cast<Options*>(&of);
  if (options != nullptr) options->betas(std::make_tuple(value, std::get<1>(options->betas())));
  return options != nullptr;
}

template <class Options>
bool put_momentum(torch::optim::OptimizerOptions& of, double value) {
  auto* const options = dynamic_cast<Options*>(&of);
  if (options != nullptr) options->momentum(value);
  return options != nullptr;
}

}  // namespace

void ClientOptimizer::put_momenta(const optim::ScheduleOptions& schedule, const std::vector<double>& momenta) {
  using namespace torch::optim;
  auto& groups = optimizer_->param_groups();
  for (size_t i = 0; i < std::min(momenta.size(), groups.size()); ++i) {
    OptimizerOptions& of = groups[i].options();
    const double value = momenta[i];
    if (put_beta<AdamOptions>(of, value) || put_beta<AdamWOptions>(of, value)) continue;
    const bool put =
        optim::is_torchs(schedule) && (put_momentum<SGDOptions>(of, value) || put_momentum<RMSpropOptions>(of, value));
    optim::check_has_momentum(schedule, put);
  }
}

bool ClientOptimizer::has_betas() const {
  return std::ranges::any_of(optimizer_->param_groups(), [](const auto& group) {
    const auto* const of = &group.options();
    return dynamic_cast<const torch::optim::AdamOptions*>(of) || dynamic_cast<const torch::optim::AdamWOptions*>(of);
  });
}

// Torch's Adagrad has its states from its constructor on, and its step needs them.
void ClientOptimizer::begin_state(const at::Tensor& target, const torch::optim::OptimizerParamGroup& group) {
  if (dynamic_cast<torch::optim::Adagrad*>(optimizer_.get()) == nullptr) return;
  const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
  auto state = std::make_unique<torch::optim::AdagradParamState>();
  state->step(0);
  state->sum(at::full_like(target.detach(), options.initial_accumulator_value()));
  optimizer_->state()[target.unsafeGetTensorImpl()] = std::move(state);
}

void ClientOptimizer::add_target(engine::Engine& core, int param, const at::Tensor& tensor,
                                 std::vector<at::Tensor>& taken) {
  at::Tensor target = tensor;
  if (!on_params_) {
    const at::Tensor master = core.states().local_view(param, engine::Quantity::Master);
    const bool empty = !master.defined() || master.numel() == 0;
    if (empty && whole_ == nullptr) return;
    target = empty ? at::empty({0}, tensor.options().dtype(at::kFloat).requires_grad(false)) : master.detach();
    target.requires_grad_(true);
  }
  taken.push_back(target);
  targets_.push_back({param, target});
  if (whole_ != nullptr) whole_->add_number(target, param);
}

void ClientOptimizer::take(engine::Engine& core, bool on_params) {
  on_params_ = on_params;
  std::unordered_map<const void*, int> numbers;
  for (size_t i = 0; i < core.params().size(); ++i)
    if (core.params()[i].group >= 0)
      numbers.emplace(core.params()[i].tensor.unsafeGetTensorImpl(), static_cast<int>(i));
  core.checkpoints().on_all([&] {
    if (whole_ != nullptr) whole_->use(engine::shards_of(core, type_->name), {});
    if (!on_params_) optimizer_->state().clear();
    for (auto& group : optimizer_->param_groups()) {
      std::vector<at::Tensor> taken;
      for (const at::Tensor& param : group.params())
        if (const auto number = numbers.find(param.unsafeGetTensorImpl()); number != numbers.end())  // not frozen
          add_target(core, number->second, param, taken);
      group.params() = std::move(taken);
      for (const at::Tensor& target : on_params_ ? std::vector<at::Tensor>() : group.params())
        begin_state(target, group);
    }
  });
}

void ClientOptimizer::check_added(const std::vector<optim::GroupOptions>& groups,
                                  const std::vector<engine::ParamSpec>& specs) const {
  if (type_ == nullptr) return;
  std::vector<optim::GroupOptions> all = groups_;
  all.insert(all.end(), groups.begin(), groups.end());
  for (const engine::ParamSpec& spec : specs)
    check_matrix(*type_, all, spec);
}

void ClientOptimizer::add_group(const optim::GroupOptions& options) {
  originals_.emplace_back();
  if (type_ == nullptr) return;  // the program has added it
  groups_.push_back(options);
  optimizer_->add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>()));
  put_group(groups_.size() - 1);
}

void ClientOptimizer::take_added(size_t number, const std::vector<at::Tensor>& params) {
  if (type_ != nullptr) return;
  std::vector<at::Tensor>& original = originals_.at(number);
  original.insert(original.end(), params.begin(), params.end());
  const auto is_added = [&](const at::Tensor& listed) {
    return std::ranges::any_of(params, [&](const at::Tensor& param) { return param.is_same(listed); });
  };
  std::erase_if(optimizer_->param_groups().at(number).params(), is_added);
}

// Takes parameters that began to be trained in this step.
void ClientOptimizer::take_joined(engine::Engine& core) {
  for (const int param : core.take_joined()) {
    const engine::ParamSpec& spec = core.params()[param];
    if (type_ != nullptr) originals_[spec.group].push_back(spec.tensor);  // a program's own has it there already
    auto& group = optimizer_->param_groups()[spec.group];
    const size_t before = group.params().size();
    add_target(core, param, spec.tensor, group.params());
    if (group.params().size() > before) begin_state(group.params().back(), group);
  }
}

void ClientOptimizer::release() {
  if (!on_params_) optimizer_->state().clear();
  const size_t there = optimizer_->param_groups().size();  // the program may have taken one out
  for (size_t number = 0; number < std::min(there, originals_.size()); ++number) {
    auto& group = optimizer_->param_groups()[number];
    group.params() = originals_[number];
    for (const at::Tensor& param : on_params_ ? std::vector<at::Tensor>() : originals_[number])
      begin_state(param, group);
  }
  targets_.clear();
}

void ClientOptimizer::publish(engine::Engine& core) {
  std::vector<std::string> terms;
  if (core.groups().size() != originals_.size()) return;  // the step says it
  for (size_t number = 0; number < originals_.size(); ++number) {
    if (type_ == nullptr) {
      core.groups()[number].lr = rate_of(optimizer_->param_groups()[number]);
      continue;
    }
    groups_[number] = core.groups()[number];
    put_group(number);
    terms.push_back(optim::text_of(*type_, groups_[number]) + " in param group " + std::to_string(number));
  }
  if (type_ != nullptr) core.set_client_terms(terms);
}

void ClientOptimizer::keep_options(engine::Engine& core) const {
  for (size_t number = 0; number < groups_.size(); ++number) {
    const double rate = core.groups()[number].lr;
    core.groups()[number] = groups_[number];
    core.groups()[number].lr = rate;
  }
}

void ClientOptimizer::put_group(size_t number) {
  if (whole_ != nullptr)
    whole_->group(number) = groups_[number];
  else
    optimizer_->param_groups()[number].set_options(torch_options(*type_, groups_[number]));
}

void ClientOptimizer::set_rate(size_t group, double rate) {
  optimizer_->param_groups()[group].options().set_lr(rate);
}

void ClientOptimizer::run(engine::Engine& core) {
  take_joined(core);
  for (const Target& target : targets_)
    target.tensor.mutable_grad() = core.states().local_view(target.param, engine::Quantity::Gradient);
  optimizer_->step();
  for (const Target& target : targets_)
    if (!on_params_) target.tensor.mutable_grad().reset();
}

ClientOptimizer::State ClientOptimizer::state_of(const at::Tensor& target) const {
  const auto found = optimizer_->state().find(target.unsafeGetTensorImpl());
  if (found == optimizer_->state().end()) return {};
  OutputArchive out;
  found->second->serialize(out);
  InputArchive in = archive_from(text_of(out));
  State state;
  for (const std::string& key : in.keys()) {
    c10::IValue value;
    in.read(key, value);
    if (!value.isTensor() || value.toTensor().defined()) state.emplace(key, std::move(value));
  }
  return state;
}

std::map<std::string, std::vector<int64_t>> ClientOptimizer::whole_states(const Target& target) const {
  std::map<std::string, std::vector<int64_t>> found;
  if (whole_ == nullptr) return found;
  for (const optim::WholeState& one : whole_->states_of(target.tensor, {}))
    if (one.sizes) found.emplace(one.name, *one.sizes);
  return found;
}

bool ClientOptimizer::keeps(const Target& target) const {
  return target.tensor.numel() > 0 || !whole_states(target).empty();
}

std::vector<engine::ClientState> ClientOptimizer::states(const engine::Engine& core) const {
  std::vector<engine::ClientState> states;
  for (const Target& target : targets_) {
    if (target.tensor.numel() == 0) continue;
    const auto whole = whole_states(target);
    for (const auto& [key, value] : state_of(target.tensor)) {
      if (is_number(key, value, target.tensor) || whole.contains(key)) continue;
      const std::string& name = core.params()[target.param].name;
      TESSERA_CHECK_VALUE(!is_own_kind(key), "engine.save_checkpoint", "an optimizer state cannot be named '", key,
                          "'");
      TESSERA_CHECK_BUILT(value.toTensor().sizes() == target.tensor.sizes(), "engine.save_checkpoint", "'", key,
                          "' of '", name, "' is neither a number nor one value for each element: it has shape ",
                          value.toTensor().sizes(), ", and the optimizer was given ", target.tensor.sizes());
      states.push_back({target.param, key, value.toTensor()});
    }
  }
  return states;
}

c10::IValue ClientOptimizer::numbers(const engine::Engine& core) const {
  c10::impl::GenericDict all(c10::StringType::get(), c10::AnyType::get());
  for (const Target& target : targets_) {
    if (target.tensor.numel() == 0) continue;
    c10::impl::GenericDict numbers(c10::StringType::get(), c10::AnyType::get());
    const auto whole = whole_states(target);
    for (const auto& [key, value] : state_of(target.tensor))
      if (is_number(key, value, target.tensor) || whole.contains(key)) numbers.insert(key, value);
    if (!numbers.empty()) all.insert(core.params()[target.param].name, numbers);
  }
  return all;
}

// Writes states as torch::optim::serialize() does; the classes of states and options do not matter.
std::string ClientOptimizer::archive_of(const std::map<const void*, State>& states) const {
  OutputArchive root, all_states(root.compilation_unit()), groups(root.compilation_unit());
  const auto key_of = [](const void* param) { return std::to_string(reinterpret_cast<size_t>(param)); };
  for (const auto& [param, state] : states) {
    OutputArchive one(root.compilation_unit());
    for (const auto& [key, value] : state)
      one.write(key, value);
    all_states.write(key_of(param), one);
  }
  const auto& present = optimizer_->param_groups();
  groups.write("param_groups/size", at::scalar_tensor(static_cast<int64_t>(present.size()), at::kLong));
  for (size_t number = 0; number < present.size(); ++number) {
    const auto& params = present[number].params();
    OutputArchive group(root.compilation_unit()), options(root.compilation_unit());
    group.write("params/size", at::scalar_tensor(static_cast<int64_t>(params.size()), at::kLong));
    for (size_t i = 0; i < params.size(); ++i)
      group.write("params/" + std::to_string(i), c10::IValue(key_of(params[i].unsafeGetTensorImpl())));
    present[number].options().serialize(options);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(number), group);
  }
  root.write("pytorch_version", c10::IValue("1.5.0"));
  root.write("state", all_states);
  root.write("param_groups", groups);
  return text_of(root);
}

// A state of one row that has the parameter's own shape lies beside the weights in some checkpoints.
void ClientOptimizer::add_whole(const Target& target, const engine::Engine& core, const checkpoint::Reader& saved,
                                State& state) const {
  const std::string& name = core.params()[target.param].name;
  for (const auto& [kind, sizes] : whole_states(target)) {
    if (!state.contains(kind) && saved.find(name, kind) != nullptr) state[kind] = saved.read_whole(name, kind);
    if (!state.contains(kind)) continue;
    TESSERA_CHECK_IO(state[kind].isTensor() && state[kind].toTensor().sizes() == at::IntArrayRef(sizes), "checkpoint",
                     kind, " of '", name,
                     "' is of another shape than this parameter's, or of a part of it: load with the "
                     "ranks and the stage it was saved with, or without the optimizer's states");
    state[kind] = state[kind].toTensor().to(target.tensor.options().requires_grad(false));
  }
}

std::string ClientOptimizer::saved(const engine::Engine& core, const engine::Restore& found) const {
  std::set<std::string> kinds;
  for (const auto& tensor : found.reader().manifest().tensors)
    if (!is_own_kind(tensor.kind)) kinds.insert(tensor.kind);
  std::map<std::string, State> numbers;
  for (const auto& [name, file] : found.reader().manifest().blobs)
    if (name.starts_with("optimizer-")) add_numbers(found.reader().blob(name), "'" + name + "'", numbers);
  // Flat groups of DeepSpeed's have one number of steps for all their parameters.
  std::map<std::string, int64_t> steps;
  for (const auto& param : found.reader().manifest().params)
    if (param.step > 0) {
      steps[param.name] = param.step;
      for (const std::string& alias : param.aliases)
        steps[alias] = param.step;
    }
  std::map<const void*, State> states;
  for (const Target& target : targets_) {
    if (!keeps(target)) continue;
    const engine::ParamSpec& spec = core.params()[target.param];
    State state = numbers[spec.name];
    for (auto& [key, value] : state)
      value = engine::part_of_number(key, value, core.layout().form(target.param).sizes, target.tensor);
    const auto whole = whole_states(target);
    for (const std::string& kind : kinds) {
      const at::Tensor part = whole.contains(kind) ? at::Tensor() : found.client_state(target.param, kind);
      if (part.defined())
        state[kind] = part.to(target.tensor.device()).as_strided(target.tensor.sizes(), target.tensor.strides());
    }
    if (!whole.empty()) add_whole(target, core, found.reader(), state);
    const auto saved_step = steps.find(spec.name);
    if (!state.empty() && saved_step != steps.end()) state.emplace("step", saved_step->second);
    if (!state.empty()) states.emplace(target.tensor.unsafeGetTensorImpl(), std::move(state));
  }
  return archive_of(states);
}

checkpoint::DeepSpeedHints::Groups ClientOptimizer::names(const engine::Engine& core) const {
  std::unordered_map<const void*, const engine::ParamSpec*> known;
  for (const engine::ParamSpec& spec : core.params())
    known.emplace(spec.tensor.unsafeGetTensorImpl(), &spec);
  checkpoint::DeepSpeedHints::Groups groups(originals_.size());
  for (size_t number = 0; number < originals_.size(); ++number)
    for (const at::Tensor& param : originals_[number])
      if (const auto found = known.find(param.unsafeGetTensorImpl()); found != known.end())
        groups[number].emplace_back(found->second->name, found->second->group >= 0);
  return groups;
}

std::map<const void*, ClientOptimizer::State> ClientOptimizer::all_states() const {
  std::map<const void*, State> states;
  for (const Target& target : targets_)
    if (State state = state_of(target.tensor); !state.empty() && keeps(target))
      states.emplace(target.tensor.unsafeGetTensorImpl(), std::move(state));
  return states;
}

std::string ClientOptimizer::present() const {
  return archive_of(all_states());
}

std::string ClientOptimizer::name() const {
  return type_ != nullptr ? type_->name : class_of(*optimizer_);
}

at::Tensor ClientOptimizer::target(int param) const {
  const auto found = std::ranges::find(targets_, param, &Target::param);
  return found == targets_.end() ? at::Tensor() : found->tensor;
}

ClientOptimizer::State ClientOptimizer::state(int param) const {
  const at::Tensor mine = target(param);
  return mine.defined() && mine.numel() > 0 ? state_of(mine) : State();
}

void ClientOptimizer::write_state(int param, const std::string& key, const at::Tensor& part) {
  auto states = all_states();
  c10::IValue& value = states.at(target(param).unsafeGetTensorImpl()).at(key);
  if (value.isInt()) {
    value = static_cast<int64_t>(part.item<double>());
  } else if (value.isDouble()) {
    value = part.item<double>();
  } else {
    const at::Tensor before = value.toTensor();
    value = part.detach().to(before.options(), /*non_blocking=*/false, /*copy=*/true).view(before.sizes());
  }
  load(archive_of(states));
}

void ClientOptimizer::load(const std::string& archive) try {
  InputArchive in = archive_from(archive);
  optimizer_->state().clear();
  optimizer_->load(in);
  for (const auto& group : optimizer_->param_groups())
    for (const at::Tensor& target : group.params())
      if (optimizer_->state().count(target.unsafeGetTensorImpl()) == 0) begin_state(target, group);
} catch (const c10::Error& error) {
  TESSERA_FAIL(IoError, "[checkpoint] the optimizer's states are damaged, or of another class than ",
               class_of(*optimizer_), ": ", error.what_without_backtrace());
}

void ClientOptimizer::try_load(const std::string& archive, const std::string& present) try {
  load(archive);
  load(present);
} catch (const IoError&) {
  load(present);
  throw;
}

}  // namespace tessera::nn

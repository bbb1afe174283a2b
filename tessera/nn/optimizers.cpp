#include "tessera/nn/optimizers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <variant>

#include "tessera/base/error.h"
#include "tessera/nn/element_optimizer.h"
#include "tessera/nn/torch_optimizer.h"
#include "tessera/nn/whole_optimizer.h"
#include "tessera/optim/tensors.h"
#include "tessera/optim/types.h"

namespace tessera::nn {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// What a name stands for.
struct OptimizerKind {
  std::string name;
  const optim::Type* type = nullptr;
  optim::OptimizerOptions options;
  bool on_cpu_only = true;

  bool has_kernel() const { return optim::has_kernel(type->rule); }
  bool is_adam() const { return type->rule == optim::Rule::Adam; }
};

OptimizerKind optimizer_kind(const std::string& type) {
  if (type == "FusedAdam")
    return {type, optim::find_type("AdamW"), optim::options_of_type("AdamW"), /*on_cpu_only=*/false};
  if (const optim::Type* const found = optim::find_type(type)) {
    OptimizerKind kind{found->name, found,
                       optim::options_of_type(found->name, found->name != std::string_view("Adam"))};
    if (kind.name == "AdamW")
      kind.options.defaults.weight_decay = optim::find_torch_type("AdamW")->defaults.weight_decay;
    return kind;
  }
  const optim::Type* const found = optim::find_torch_type(type);
  TESSERA_CHECK_VALUE(found != nullptr, "make_optimizer", "unknown optimizer type '", type, "'; known are FusedAdam, ",
                      optim::cpp_types());
  return {found->name, found, {.rule = found->rule, .defaults = found->defaults, .type = found}};
}

// f(name, value) for every hyper-parameter that torch's options have, too; of betas f(name, beta1, beta2).
template <class Group, class F>
void each_field(const optim::Type& type, Group& group, const F& f) {
  for (const optim::Field& field : type.fields)
    std::visit(
        [&]<class T>(const T& at) {
          if constexpr (std::is_same_v<T, optim::Field::Pair>)
            f(field.name, group.*at.first, group.*at.second);
          else
            f(field.name, group.*at);
        },
        field.where);
}

struct FieldWriter {
  OutputArchive& archive;
  template <class T>
  void operator()(const char* name, const T& value) const {
    archive.write(name, c10::IValue(value));
  }
  void operator()(const char* name, double first, double second) const {
    archive.write(name, c10::IValue(std::make_tuple(first, second)));
  }
};

// Leaves a value as it is where the archive has none.
struct FieldReader {
  InputArchive& archive;
  template <class T>
  void operator()(const char* name, T& value) const {
    c10::IValue read;
    if (archive.try_read(name, read)) value = read.to<T>();
  }
  void operator()(const char* name, double& first, double& second) const {
    c10::IValue read;
    if (archive.try_read(name, read)) std::tie(first, second) = read.to<std::tuple<double, double>>();
  }
};

// Of a param group. The name of Adam's amsgrad is there for torch::optim, which reads it.
struct KernelOptions final : WholeOptimizer::Options {
  KernelOptions(const OptimizerKind& kind, const optim::GroupOptions& group, bool stochastic, uint64_t seed)
      : WholeOptimizer::Options(group),
        type(kind.type),
        is_adam(kind.is_adam()),
        loads_decoupled(kind.name == "Adam"),
        stochastic_rounding(stochastic),
        seed(static_cast<int64_t>(seed)) {}
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<KernelOptions>(*this);
  }
  void serialize(OutputArchive& archive) const override {
    const FieldWriter write{archive};
    each_field(*type, group, write);
    if (is_adam) write("amsgrad", group.amsgrad), write("decoupled_weight_decay", group.decoupled);
    if (optim::has_kernel(type->rule)) write("stochastic_rounding", stochastic_rounding), write("seed", seed);
  }
  void serialize(InputArchive& archive) override {
    const FieldReader read{archive};
    each_field(*type, group, read);
    if (is_adam) read("amsgrad", group.amsgrad);
    if (loads_decoupled) read("decoupled_weight_decay", group.decoupled);
    read("stochastic_rounding", stochastic_rounding);
    read("seed", seed);
  }

  const optim::Type* type;
  bool is_adam, loads_decoupled;  // AdamW decouples whatever was saved
  bool stochastic_rounding;
  int64_t seed;
};

KernelOptions* kernel_options(OptimizerParamGroup& group) {
  return group.has_options() ? dynamic_cast<KernelOptions*>(&group.options()) : nullptr;
}

class KernelOptimizer final : public Optimizer {
 public:
  using State = WholeOptimizer::State;
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  KernelOptimizer(OptimizerKind kind, const KernelOptions& defaults, const std::vector<optim::GroupOptions>& groups,
                  const std::vector<std::vector<at::Tensor>>& params);

  at::Tensor step(LossClosure closure = nullptr) override;
  MadeOptimizer made();
  void save(OutputArchive& archive) const override { torch::optim::serialize<State, KernelOptions>(archive, *this); }
  void load(InputArchive& archive) override;

 private:
  template <class Error = c10::ValueError, class... Parts>
  [[noreturn]] void refuse(const char* call, const Parts&... parts) const {
    TESSERA_FAIL(Error, "[", kind_.name, call, "] ", parts...);
  }
  const KernelOptions& options(size_t number);
  void check_group(size_t number, const KernelOptions& options) const;
  void check_param(const at::Tensor& param, size_t group, size_t index) const;
  State& state_of(const at::Tensor& param, const optim::GroupOptions& group);
  void update_group(OptimizerParamGroup& param_group, uint64_t& first);
  void check_saved(State& state, const at::Tensor& param, const optim::GroupOptions& group, size_t number) const;
  void check_by_inner(const std::vector<OptimizerParamGroup>& groups, States& states);

  const OptimizerKind kind_;
  std::unique_ptr<Optimizer> inner_;  // of types without a kernel; it has groups and states while it works
};

KernelOptimizer::KernelOptimizer(OptimizerKind kind, const KernelOptions& defaults,
                                 const std::vector<optim::GroupOptions>& groups,
                                 const std::vector<std::vector<at::Tensor>>& params)
    : Optimizer(std::vector<OptimizerParamGroup>(), defaults.clone()), kind_(std::move(kind)) {
  if (kind_.type->rule == optim::Rule::External)
    inner_ = std::make_unique<ElementOptimizer>(*kind_.type, std::vector<OptimizerParamGroup>());
  else if (!kind_.has_kernel())
    inner_ = std::make_unique<WholeOptimizer>(kind_.type->rule, std::vector<optim::GroupOptions>(),
                                              std::vector<std::vector<at::Tensor>>());
  for (size_t number = 0; number < groups.size(); ++number) {
    add_param_group(OptimizerParamGroup(params[number]));
    auto& made = static_cast<KernelOptions&>(param_groups_.back().options());
    made.group = groups[number];
    check_group(number, made);
  }
}

const KernelOptions& KernelOptimizer::options(size_t number) {
  const KernelOptions* const found = kernel_options(param_groups_[number]);
  if (found == nullptr)
    refuse("", "param group ", number,
           " has options of another class: add it without, and change those of nn::group_options()");
  return *found;
}

void KernelOptimizer::check_group(size_t number, const KernelOptions& options) const {
  const optim::GroupOptions& group = options.group;
  if (kind_.is_adam() && group.amsgrad)
    refuse<c10::Error>("", "amsgrad is not supported (param group ", number, "); use the class of torch::optim");
  optim::check(*kind_.type, group, kind_.name, number);
  if (kind_.type->rule != optim::Rule::Muon || !group.use_muon) return;
  const auto vectors = std::ranges::count_if(param_groups_[number].params(), [](const auto& p) { return p.dim() < 2; });
  if (vectors > 0)
    refuse("", vectors, " parameters have fewer than two dimensions: put them into a group with use_muon false");
}

MadeOptimizer KernelOptimizer::made() {
  MadeOptimizer made{kind_.type, {}};
  for (size_t number = 0; number < param_groups_.size(); ++number) {
    const KernelOptions& present = options(number);
    check_group(number, present);
    made.groups.push_back(present.group);
    made.stochastic_rounding |= present.stochastic_rounding;
  }
  return made;
}

void KernelOptimizer::check_param(const at::Tensor& param, size_t group, size_t index) const {
  const std::string says = optim::wrong_param(kind_.type->rule, kind_.on_cpu_only, param);
  if (!says.empty()) refuse("", "parameter ", index, " of group ", group, " ", says);
}

KernelOptimizer::State& KernelOptimizer::state_of(const at::Tensor& param, const optim::GroupOptions& group) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (state == nullptr) {
    auto made = std::make_unique<State>();
    made->step = 0;
    state = std::move(made);
  }
  auto& present = static_cast<State&>(*state);
  const optim::Rule rule = kind_.type->rule;
  const optim::StateNames names = optim::state_names(rule, {group});
  for (int i = 0; i < names.count; ++i)
    if (at::Tensor& value = present.values[names.name[i]]; !value.defined())
      value = at::full_like(param.detach(), optim::initial_state(rule, group), param.options().dtype(at::kFloat));
  return present;
}

void KernelOptimizer::update_group(OptimizerParamGroup& param_group, uint64_t& first) {
  const auto& options = static_cast<const KernelOptions&>(param_group.options());
  const optim::Rule rule = kind_.type->rule;
  const optim::StateNames names = optim::state_names(rule, {options.group});
  std::vector<optim::TensorUpdate> updates;
  std::vector<State*> states;
  for (const at::Tensor& param : param_group.params()) {
    if (param.grad().defined()) {
      State& state = state_of(param, options.group);
      states.push_back(&state);
      updates.push_back({param, param.grad(), {}, *state.step + 1, first});
      for (int i = 0; i < names.count; ++i)
        updates.back().state.at(i) = state.values.at(names.name[i]);
    }
    first += static_cast<uint64_t>(param.numel());
  }
  const auto rounding = options.stochastic_rounding ? kernels::Rounding::Stochastic : kernels::Rounding::Nearest;
  optim::update_tensors(rule, options.group, updates, rounding, static_cast<uint64_t>(options.seed));
  for (State* const state : states)
    ++*state->step;
}

at::Tensor KernelOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  for (size_t number = 0; number < param_groups_.size(); ++number) {
    check_group(number, options(number));
    const auto& params = param_groups_[number].params();
    for (size_t index = 0; index < params.size(); ++index)
      if (params[index].grad().defined()) check_param(params[index], number, index);
  }
  if (inner_ != nullptr) {
    struct Lent {
      explicit Lent(KernelOptimizer& mine) : of(mine) { swap(); }
      ~Lent() { swap(); }
      Lent(const Lent&) = delete;
      Lent& operator=(const Lent&) = delete;
      void swap() const {
        std::swap(of.param_groups_, of.inner_->param_groups());
        std::swap(of.state_, of.inner_->state());
      }
      KernelOptimizer& of;
    };
    const Lent lent(*this);
    inner_->step();
    return loss;
  }
  uint64_t first = 0;
  for (OptimizerParamGroup& group : param_groups_)
    update_group(group, first);
  return loss;
}

// Of types with a kernel. torch's SGD counts no steps, which only the first one asks for.
void KernelOptimizer::check_saved(State& state, const at::Tensor& param, const optim::GroupOptions& group,
                                  size_t number) const {
  const optim::StateNames names = optim::state_names(kind_.type->rule, {group});
  std::string missing, present = state.step ? "step" : "";
  const auto add = [](std::string& list, const std::string& name) { list += (list.empty() ? "" : ", ") + name; };
  for (auto& [name, value] : state.values) {
    add(present, name);
    value = value.to(at::kFloat);
  }
  for (int i = 0; i < names.count; ++i) {
    const auto found = state.values.find(names.name[i]);
    if (found == state.values.end())
      add(missing, names.name[i]);
    else if (found->second.sizes() != param.sizes())
      refuse(".load", "the state ", found->first, " of parameter ", number, " has the shape ", found->second.sizes(),
             ", the parameter ", param.sizes());
  }
  if (!state.step && kind_.type->rule == optim::Rule::Sgd) state.step = 1;
  if (!state.step) add(missing, "step");
  if (!missing.empty()) refuse(".load", "the state of parameter ", number, " has no ", missing, "; it has ", present);
}

// The optimizer that will work with them takes the states as an archive that has them by the parameters' present addresses.
void KernelOptimizer::check_by_inner(const std::vector<OptimizerParamGroup>& groups, States& states) {
  OutputArchive written, all(written.compilation_unit());
  torch::optim::detail::serialize<State>(all, states);
  written.write("state", all);
  std::stringstream text;
  written.save_to(text);
  InputArchive archive;
  archive.load_from(text);
  const auto empty = [this] {
    inner_->param_groups().clear();
    inner_->state().clear();
  };
  for (const OptimizerParamGroup& group : groups)
    inner_->param_groups().push_back(group);
  try {
    inner_->load(archive);
  } catch (...) {
    empty();
    throw;
  }
  states = std::move(inner_->state());
  empty();
}

void KernelOptimizer::load(InputArchive& archive) {
  InputArchive all_states, all_groups;
  archive.read("state", all_states);
  archive.read("param_groups", all_groups);
  const auto size_of = [](InputArchive& saved, const std::string& name) {
    at::Tensor size;
    saved.read(name, size);
    return static_cast<size_t>(size.item<int64_t>());
  };
  if (const size_t count = size_of(all_groups, "param_groups/size"); count != param_groups_.size())
    refuse(".load", "the archive has ", count, " param groups, the optimizer has ", param_groups_.size());
  std::vector<OptimizerParamGroup> groups;
  States states;
  size_t param_number = 0;
  for (size_t number = 0; number < param_groups_.size(); ++number) {
    InputArchive saved, saved_options;
    all_groups.read("param_groups/" + std::to_string(number), saved);
    saved.read("options", saved_options);
    const auto& params = param_groups_[number].params();
    groups.emplace_back(params, options(number).clone());
    auto& loaded = static_cast<KernelOptions&>(groups.back().options());
    loaded.serialize(saved_options);
    check_group(number, loaded);
    if (const size_t count = size_of(saved, "params/size"); count != params.size())
      refuse(".load", "param group ", number, " has ", count, " parameters in the archive and ", params.size(),
             " here");
    for (size_t i = 0; i < params.size(); ++i, ++param_number) {
      c10::IValue key;
      saved.read("params/" + std::to_string(i), key);
      InputArchive saved_state;
      if (!all_states.try_read(key.toStringRef(), saved_state)) continue;
      auto state = std::make_unique<State>();
      state->read(saved_state, params[i].device());
      if (inner_ == nullptr) check_saved(*state, params[i], loaded.group, param_number);
      states[params[i].unsafeGetTensorImpl()] = std::move(state);
    }
  }
  if (inner_ != nullptr) check_by_inner(groups, states);
  for (size_t number = 0; number < groups.size(); ++number)
    param_groups_[number].set_options(groups[number].options().clone());
  state_ = std::move(states);
}

// The parameters of each group of `groups`, and of the last one, which has the others; marks those that are not to be trained.
std::vector<optim::GroupOptions> sort_params(const OptimizerKind& kind,
                                             const torch::OrderedDict<std::string, at::Tensor>& params,
                                             std::vector<ParamGroup> groups,
                                             std::vector<std::vector<at::Tensor>>& by_group) {
  std::vector<engine::ParamSpec> specs;
  std::unordered_set<const void*> seen;
  for (const auto& item : params)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second) {
      specs.push_back({item.key(), item.value(), 0, ""});
      specs.back().joins = 0;
    }
  TESSERA_CHECK_VALUE(!specs.empty(), "make_optimizer", "there are no parameters");
  std::vector<engine::ParamSpec> trained = specs;
  std::vector<ParamGroup> freezing = groups;
  for (size_t number = 0; number < groups.size(); ++number) {
    freezing[number].set = nullptr;
    groups[number].frozen = false;  // what is frozen has a place in its group all the same
  }
  group_params(freezing, optim::options_of_type("SGD"), /*whole=*/true, specs);
  std::vector<optim::GroupOptions> options = group_params(groups, kind.options, /*whole=*/true, trained);
  by_group.resize(options.size());
  for (const engine::ParamSpec& spec : trained)
    by_group[spec.joins].push_back(spec.tensor);
  return options;
}

}  // namespace

optim::GroupOptions& group_options(OptimizerParamGroup& group) {
  KernelOptions* const found = kernel_options(group);
  TESSERA_CHECK_VALUE(
      found != nullptr, "group_options",
      "the options are not of an optimizer of nn::make_optimizer(), or of one that is torch::optim's own class");
  return found->group;
}

std::optional<MadeOptimizer> made_optimizer(Optimizer& optimizer) {
  auto* const found = dynamic_cast<KernelOptimizer*>(&optimizer);
  return found == nullptr ? std::nullopt : std::optional(found->made());
}

std::shared_ptr<Optimizer> make_optimizer(const std::string& type,
                                          const torch::OrderedDict<std::string, at::Tensor>& params,
                                          const OptimizerArguments& arguments) {
  OptimizerKind kind = optimizer_kind(type);
  for (optim::GroupOptions* const options :
       {&kind.options.defaults, kind.options.others ? &*kind.options.others : nullptr})
    if (options != nullptr) {
      const bool use_muon = options->use_muon;
      if (arguments.set) arguments.set(*options);
      options->use_muon = use_muon;
      optim::check(*kind.type, *options, kind.name);
    }
  TESSERA_CHECK_VALUE(kind.has_kernel() || !arguments.stochastic_rounding, "make_optimizer",
                      "stochastic_rounding is for ", optim::native_types(), " and FusedAdam, not for ", kind.name);
  std::vector<std::vector<at::Tensor>> by_group;
  const auto groups = sort_params(kind, params, arguments.groups, by_group);
  const bool has_amsgrad = kind.is_adam() && std::ranges::any_of(groups, &optim::GroupOptions::amsgrad);
  if (has_amsgrad && kind.on_cpu_only) {
    const auto fits = [](const optim::GroupOptions& group) { return group.bias_correction && !group.maximize; };
    TESSERA_CHECK_VALUE(std::ranges::all_of(groups, fits) && !arguments.stochastic_rounding, "make_optimizer",
                        "amsgrad is torch::optim's, which has no stochastic_rounding, no maximize and always "
                        "bias_correction; leave these out, or amsgrad");
    return torch_optimizer(*optim::find_torch_type(kind.name), groups, by_group);
  }
  if (kind.type->rule == optim::Rule::External && !ElementOptimizer::is_made_here(*kind.type))
    return torch_optimizer(*kind.type, groups, by_group);
  const KernelOptions defaults(kind, kind.options.defaults, arguments.stochastic_rounding, arguments.seed);
  return std::make_shared<KernelOptimizer>(std::move(kind), defaults, groups, by_group);
}

}  // namespace tessera::nn

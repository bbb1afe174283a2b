#include "tessera/nn/whole_optimizer.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/serialize/archive.h>

#include <utility>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

using torch::optim::OptimizerParamGroup;

std::vector<OptimizerParamGroup> groups_of(const std::vector<optim::GroupOptions>& groups,
                                           const std::vector<std::vector<at::Tensor>>& params) {
  std::vector<OptimizerParamGroup> made;
  for (size_t i = 0; i < groups.size(); ++i)
    made.emplace_back(params[i], std::make_unique<WholeOptimizer::Options>(groups[i]));
  return made;
}

bool counts_steps(optim::Rule rule, const optim::GroupOptions& group) {
  return rule != optim::Rule::Muon || !group.use_muon;
}

}  // namespace

void WholeOptimizer::State::serialize(torch::serialize::OutputArchive& archive) const {
  if (step) archive.write("step", c10::IValue(*step));
  for (const auto& [name, value] : values)
    archive.write(name, c10::IValue(value));
}

void WholeOptimizer::State::read(torch::serialize::InputArchive& saved, at::Device device) {
  for (const std::string& name : saved.keys()) {
    c10::IValue value;
    saved.read(name, value);
    if (name == "step")
      step = value.isTensor() ? value.toTensor().item<int64_t>() : value.toInt();
    else
      values[name] = value.toTensor().to(device);
  }
}

WholeOptimizer::WholeOptimizer(optim::Rule rule, const std::vector<optim::GroupOptions>& groups,
                               const std::vector<std::vector<at::Tensor>>& params)
    : Optimizer(groups_of(groups, params), std::make_unique<Options>()), rule_(rule) {
  for (size_t i = 0; i < groups.size(); ++i) {
    optim::check(optim::type_of(rule), groups[i]);
    param_groups()[i].set_options(std::make_unique<Options>(groups[i]));  // torch has put its defaults there
  }
}

void WholeOptimizer::use(optim::ShardsPtr shards, std::unordered_map<const void*, int> numbers) {
  shards_ = std::move(shards);
  numbers_ = std::move(numbers);
}

optim::GroupOptions& WholeOptimizer::group(size_t number) {
  return static_cast<Options&>(param_groups()[number].options()).group;
}

int WholeOptimizer::number_of(const at::Tensor& param) const {
  const auto found = numbers_.find(param.unsafeGetTensorImpl());
  return found == numbers_.end() ? -1 : found->second;
}

std::vector<optim::WholeState> WholeOptimizer::states_of(const at::Tensor& param,
                                                         const optim::GroupOptions& group) const {
  return optim::whole_states(rule_, group, shards_->sizes(number_of(param), param));
}

WholeOptimizer::State& WholeOptimizer::state_of(const at::Tensor& param, const optim::GroupOptions& group) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (state == nullptr) {
    auto made = std::make_unique<State>();
    for (const optim::WholeState& one : states_of(param, group))
      made->values[one.name] =
          one.sizes ? at::zeros(*one.sizes, param.options().requires_grad(false)) : at::zeros_like(param.detach());
    if (counts_steps(rule_, group)) made->step = 0;
    state = std::move(made);
  }
  return static_cast<State&>(*state);
}

at::Tensor WholeOptimizer::step(LossClosure closure) {
  TESSERA_CHECK_BUILT(!closure, "optimizer.step", "a closure is not taken");
  std::vector<optim::WholeUpdate> updates;
  for (size_t number = 0; number < param_groups().size(); ++number) {
    const optim::GroupOptions& options = group(number);
    for (const at::Tensor& param : param_groups()[number].params()) {
      if (!param.grad().defined()) continue;
      State& state = state_of(param, options);
      if (state.step) ++*state.step;
      optim::WholeUpdate update{&options, number_of(param), param, param.grad(), state.step.value_or(1)};
      size_t place = 0;
      for (const optim::WholeState& one : states_of(param, options))
        update.state.at(place++) = state.values.at(one.name);
      updates.push_back(std::move(update));
    }
  }
  optim::update_whole(rule_, updates, *shards_);
  return {};
}

void WholeOptimizer::load(torch::serialize::InputArchive& archive) {
  load_states(*this, archive, optim::type_of(rule_).name,
              [this](const optim::GroupOptions& group, const at::Tensor& param) {
                StateForm form{.names = {}, .counts_steps = counts_steps(rule_, group)};
                for (const optim::WholeState& one : states_of(param, group))
                  form.names.emplace_back(one.name);
                return form;
              });
}

void load_states(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive, const std::string& name,
                 const std::function<StateForm(const optim::GroupOptions&, const at::Tensor&)>& form) {
  torch::serialize::InputArchive states;
  archive.read("state", states);
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const WholeOptimizer::Options&>(group.options()).group;
    for (const at::Tensor& param : group.params()) {
      const StateForm wanted = form(options, param);
      torch::serialize::InputArchive saved;
      void* const key = param.unsafeGetTensorImpl();
      if (!states.try_read(std::to_string(reinterpret_cast<size_t>(key)), saved)) continue;
      auto state = std::make_unique<WholeOptimizer::State>();
      state->read(saved, param.device());
      for (const std::string& of : wanted.names)
        TESSERA_CHECK_IO(state->values.contains(of), "checkpoint", "there is no ", of,
                         " of a parameter; the states are those of another optimizer than ", name);
      if (wanted.counts_steps && !state->step) state->step = 0;
      optimizer.state()[key] = std::move(state);
    }
  }
}

}  // namespace tessera::nn

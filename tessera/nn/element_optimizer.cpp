#include "tessera/nn/element_optimizer.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

using StateValues = std::map<std::string, at::Tensor>;

// One update of a parameter. `step` counts from 1.
struct ElementUpdate {
  const optim::GroupOptions& group;
  int64_t step;
  at::Tensor param, grad;
  StateValues& state;

  at::Tensor& operator[](const char* name) { return state.at(name); }
  double correction(double beta) const { return 1 - std::pow(beta, static_cast<double>(step)); }
  void average_moments() {
    (*this)["exp_avg"].lerp_(grad, 1 - group.beta1);
    (*this)["exp_avg_sq"].mul_(group.beta2).addcmul_(grad, grad, 1 - group.beta2);
  }
};

void nadam(ElementUpdate& p) {
  const optim::GroupOptions& g = p.group;
  const auto momentum = [&](int64_t step) {
    return g.beta1 * (1 - 0.5 * std::pow(0.96, static_cast<double>(step) * g.lr_decay));
  };
  const double mu = momentum(p.step), next = momentum(p.step + 1);
  const double product = p["mu_product"].mul_(mu).item<double>();
  p.average_moments();
  const at::Tensor spread = p["exp_avg_sq"].div(p.correction(g.beta2)).sqrt_().add_(g.eps);
  p.param.addcdiv_(p.grad, spread, -g.lr * (1 - mu) / (1 - product));
  p.param.addcdiv_(p["exp_avg"], spread, -g.lr * next / (1 - product * next));
}

void radam(ElementUpdate& p) {
  const optim::GroupOptions& g = p.group;
  p.average_moments();
  const double correction = p.correction(g.beta2), most = 2 / (1 - g.beta2) - 1;
  const double length = most - 2 * static_cast<double>(p.step) * (1 - correction) / correction;
  at::Tensor change = p["exp_avg"] / p.correction(g.beta1) * g.lr;
  if (length > 5) {
    const double rectified = std::sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length));
    change = change * (std::sqrt(correction) / p["exp_avg_sq"].sqrt().add_(g.eps)) * rectified;
  }
  p.param.sub_(change);
}

void adamax(ElementUpdate& p) {
  const optim::GroupOptions& g = p.group;
  p["exp_avg"].lerp_(p.grad, 1 - g.beta1);
  at::Tensor& largest = p["exp_inf"];
  at::maximum_out(largest, largest.mul_(g.beta2), p.grad.abs().add_(g.eps));
  p.param.addcdiv_(p["exp_avg"], largest, -g.lr / p.correction(g.beta1));
}

void adadelta(ElementUpdate& p) {
  const optim::GroupOptions& g = p.group;
  at::Tensor &squares = p["square_avg"], &changes = p["acc_delta"];
  squares.mul_(g.alpha).addcmul_(p.grad, p.grad, 1 - g.alpha);
  const at::Tensor change = changes.add(g.eps).sqrt_().div_(squares.add(g.eps).sqrt_()).mul_(p.grad);
  changes.mul_(g.alpha).addcmul_(change, change, 1 - g.alpha);
  p.param.add_(change, -g.lr);
}

void asgd(ElementUpdate& p) {
  const optim::GroupOptions& g = p.group;
  at::Tensor &rate = p["eta"], &share = p["mu"], &mean = p["ax"];
  const double eta = rate.item<double>();
  p.param.mul_(1 - g.lambd * eta).add_(p.grad, -eta);
  if (share.item<double>() != 1)
    mean.add_(p.param.sub(mean).mul_(share));
  else
    mean.copy_(p.param);
  const auto step = static_cast<double>(p.step);
  rate.fill_(g.lr / std::pow(1 + g.lambd * g.lr * step, g.alpha));
  share.fill_(1 / std::max(1.0, step - g.t0));
}

void rprop(ElementUpdate& p) {
  const optim::GroupOptions& g = p.group;
  at::Tensor &prev = p["prev"], &size = p["step_size"];
  const at::Tensor product = p.grad.mul(prev), turns = product.lt(0);
  const at::Tensor factor =
      at::ones_like(size).masked_fill_(product.gt(0), g.eta_plus).masked_fill_(turns, g.eta_minus);
  size.mul_(factor).clamp_(g.step_size_min, g.step_size_max);
  const at::Tensor grad = p.grad.masked_fill(turns, 0);
  p.param.addcmul_(grad.sign(), size, -1);
  prev.copy_(grad);
}

// A state at the start: one number, or as many as the parameter has.
struct ElementState {
  const char* name;
  bool is_number = false;
  double (*begin)(const optim::GroupOptions& group) = [](const optim::GroupOptions&) { return 0.0; };
};
double one(const optim::GroupOptions&) {
  return 1;
}
double rate_of(const optim::GroupOptions& group) {
  return group.lr;
}

struct ElementRule {
  std::string_view name;
  void (*update)(ElementUpdate& update);
  std::vector<ElementState> states;
};

const ElementRule* element_rule(std::string_view name) {
  static const std::vector<ElementRule> all{{"NAdam", nadam, {{"exp_avg"}, {"exp_avg_sq"}, {"mu_product", true, one}}},
                                            {"RAdam", radam, {{"exp_avg"}, {"exp_avg_sq"}}},
                                            {"Adamax", adamax, {{"exp_avg"}, {"exp_inf"}}},
                                            {"Adadelta", adadelta, {{"square_avg"}, {"acc_delta"}}},
                                            {"ASGD", asgd, {{"eta", true, rate_of}, {"mu", true, one}, {"ax"}}},
                                            {"Rprop", rprop, {{"prev"}, {"step_size", false, rate_of}}}};
  const auto found = std::ranges::find(all, name, &ElementRule::name);
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

bool ElementOptimizer::is_made_here(const optim::Type& type) {
  return element_rule(type.name) != nullptr;
}

ElementOptimizer::ElementOptimizer(const optim::Type& type,
                                   const std::vector<torch::optim::OptimizerParamGroup>& groups)
    : Optimizer(groups, std::make_unique<Options>()), type_(type) {
  for (size_t i = 0; i < groups.size(); ++i)
    param_groups()[i].set_options(groups[i].options().clone());  // torch has put its defaults there
}

at::Tensor ElementOptimizer::step(LossClosure closure) {
  TESSERA_CHECK_BUILT(!closure, "optimizer.step", "a closure is not taken");
  const at::NoGradGuard no_grad;
  const ElementRule& rule = *element_rule(type_.name);
  for (auto& param_group : param_groups()) {
    const optim::GroupOptions& group = static_cast<const Options&>(param_group.options()).group;
    for (at::Tensor& param : param_group.params()) {
      if (!param.grad().defined()) continue;
      auto& state = state_[param.unsafeGetTensorImpl()];
      if (state == nullptr) {
        auto made = std::make_unique<State>();
        made->step = 0;
        for (const ElementState& one : rule.states)
          made->values[one.name] = one.is_number ? at::full({}, one.begin(group), at::kFloat)
                                                 : at::full_like(param.detach(), one.begin(group));
        state = std::move(made);
      }
      auto& present = static_cast<State&>(*state);
      at::Tensor grad = param.grad();
      if (group.maximize) grad = grad.neg();
      if (group.weight_decay != 0 && group.decoupled) param.mul_(1 - group.lr * group.weight_decay);
      if (group.weight_decay != 0 && !group.decoupled) grad = grad.add(param, group.weight_decay);
      ElementUpdate update{group, ++*present.step, param, grad, present.values};
      rule.update(update);
    }
  }
  return {};
}

void ElementOptimizer::load(torch::serialize::InputArchive& archive) {
  StateForm form;
  for (const ElementState& state : element_rule(type_.name)->states)
    form.names.emplace_back(state.name);
  load_states(*this, archive, std::string(type_.name),
              [&](const optim::GroupOptions&, const at::Tensor&) { return form; });
}

}  // namespace tessera::nn

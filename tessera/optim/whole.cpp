#include "tessera/optim/whole.h"

#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/base/error.h"

namespace tessera::optim {
namespace {

// Coefficients a, b, c of Jordan et al., https://kellerjordan.github.io/posts/muon
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr double kSmallestNorm = 1e-7;

class WholeParameters final : public Shards {
 public:
  at::Tensor whole(int, const at::Tensor& part) override { return part; }
  at::Tensor mine(int, const at::Tensor& full) override { return full; }
  std::vector<double> norms(const std::vector<std::pair<int, at::Tensor>>& parts) override {
    std::vector<at::Tensor> sums;
    for (const auto& [param, values] : parts)
      sums.push_back(squares(values));
    const at::Tensor norms = at::stack(sums).sqrt().to(at::kCPU);
    return {norms.const_data_ptr<double>(), norms.const_data_ptr<double>() + norms.numel()};
  }
};

// torch's in-place product with a number rounds the number to 16 bits first, where the tensor has them; a tensor that stands for
// a number is not rounded.
void scale(const at::Tensor& values, double factor) {
  values.mul_(at::native::wrapped_scalar_tensor(factor));
}

// Adds this gradient to Adam's moments.
void add_moments(const WholeUpdate& u, const at::Tensor& grad) {
  u.state[0].lerp_(grad, 1 - u.group->beta1);
  scale(u.state[1], u.group->beta2);
  u.state[1].addcmul_(grad, grad, 1 - u.group->beta2);
}

double correction(double beta, int64_t step) {
  return 1 - std::pow(beta, static_cast<double>(step));
}

at::Tensor lamb_direction(const WholeUpdate& u) {
  add_moments(u, u.grad);
  const at::Tensor divisor =
      u.group->eps_inside_sqrt ? u.state[1].add(u.group->eps).sqrt_() : u.state[1].sqrt().add_(u.group->eps);
  return (u.state[0] / divisor).add_(u.values, u.group->weight_decay);
}

double lamb_rate(const WholeUpdate& u, double weight, double update) {
  const GroupOptions& group = *u.group;
  const bool moves = weight != 0 && update != 0;
  const double trust = moves ? std::min(std::max(weight / update, group.min_coeff), group.max_coeff) : 1.0;
  double rate = group.lr;
  if (group.bias_correction) rate *= std::pow(correction(group.beta2, u.step), 0.5) / correction(group.beta1, u.step);
  return rate * trust;
}

void update_lamb(const std::vector<WholeUpdate>& updates, Shards& shards) {
  std::vector<std::pair<int, at::Tensor>> parts;
  for (const WholeUpdate& u : updates)
    parts.emplace_back(u.param, u.values);
  for (const WholeUpdate& u : updates)
    parts.emplace_back(u.param, lamb_direction(u));
  const std::vector<double> norms = shards.norms(parts);
  for (size_t i = 0; i < updates.size(); ++i) {
    const size_t of_update = updates.size() + i;
    const at::Tensor values = updates[i].values;
    values.add_(parts[of_update].second, -lamb_rate(updates[i], norms[i], norms[of_update]));
  }
}

void update_matrix(const WholeUpdate& u, Shards& shards) {
  const GroupOptions& group = *u.group;
  const at::Tensor buffer = u.state[0], values = u.values;
  buffer.lerp_(u.grad, 1 - group.momentum);
  const at::Tensor update = shards.whole(u.param, group.nesterov ? u.grad.lerp(buffer, group.momentum) : buffer);
  const at::Tensor matrix = update.reshape({update.size(0), -1});
  const at::Tensor near = orthogonal(matrix, group.ns_steps).view(update.sizes());
  const double ratio = static_cast<double>(matrix.size(0)) / static_cast<double>(matrix.size(1));
  const double rate = group.lr * std::pow(std::max(1.0, ratio), 0.5);
  scale(values, 1 - group.lr * group.weight_decay);
  values.add_(shards.mine(u.param, near).view(values.sizes()), -rate);
}

void update_beside(const WholeUpdate& u) {
  const GroupOptions& group = *u.group;
  const at::Tensor values = u.values;
  add_moments(u, group.decoupled ? u.grad : u.grad.add(values, group.weight_decay));
  if (group.decoupled) scale(values, 1 - group.lr * group.weight_decay);
  const at::Tensor divisor = (u.state[1].sqrt() / std::pow(correction(group.beta2, u.step), 0.5)).add_(group.eps);
  values.addcdiv_(u.state[0], divisor, -group.lr / correction(group.beta1, u.step));
}

double epsilon_of(const GroupOptions& group, at::ScalarType dtype) {
  if (group.eps1 != kOfDtype) return group.eps1;
  switch (dtype) {
    case at::kBFloat16:
      return 0x1p-7;
    case at::kHalf:
      return 0x1p-10;
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

double norm_of(const at::Tensor& values) {
  return at::linalg_vector_norm(values, 2).item<double>();
}

at::Tensor mean_square(const at::Tensor& values, int64_t dim) {
  return at::linalg_vector_norm(values, 2, dim, /*keepdim=*/true).square_().div_(values.size(dim));
}

// Adafactor's direction: of a matrix whole, of a vector this rank's slice.
at::Tensor factored_direction(const WholeUpdate& u, const at::Tensor& grad, double share, double eps) {
  at::Tensor spread;
  if (grad.dim() > 1) {
    const at::Tensor rows = u.state[0], columns = u.state[1];
    rows.lerp_(mean_square(grad, -1), share);
    columns.lerp_(mean_square(grad, -2), share);
    spread = at::matmul(rows, columns).div_(rows.mean(-2, /*keepdim=*/true).clamp_(eps));
  } else {
    u.state[0].lerp_(grad * grad, share);
    spread = u.state[0].clone();
  }
  return spread.clamp_(eps * eps).rsqrt_().mul_(grad);
}

void update_adafactor(const WholeUpdate& u, Shards& shards) {
  const GroupOptions& group = *u.group;
  const at::Tensor values = u.values;
  const at::ScalarType dtype = values.scalar_type();
  const double step = static_cast<double>(u.step), eps = epsilon_of(group, dtype);
  const bool is_matrix = shards.sizes(u.param, values).size() > 1;
  const at::Tensor before = shards.whole(u.param, values).to(dtype);
  const double root = std::pow(static_cast<double>(before.numel()), 0.5);
  const double rate = std::max(group.eps, norm_of(before) / root) * std::min(group.lr, 1 / std::pow(step, 0.5));
  if (group.weight_decay != 0) scale(values, 1 - group.lr * group.weight_decay);
  at::Tensor grad = group.maximize ? u.grad.neg() : u.grad;
  if (is_matrix) grad = shards.whole(u.param, grad).to(dtype);
  at::Tensor direction = factored_direction(u, grad, std::pow(step, group.beta2_decay), eps);
  const double length = norm_of(is_matrix ? direction : shards.whole(u.param, direction).to(dtype));
  if (is_matrix) direction = shards.mine(u.param, direction).view(values.sizes());
  values.add_(direction, -rate / std::max(1.0, length / (root * group.d)));
}

}  // namespace

ShardsPtr whole_parameters() {
  return std::make_shared<WholeParameters>();
}

at::Tensor squares(const at::Tensor& values) {
  return values.to(at::kDouble).square().sum();
}

std::vector<WholeState> whole_states(Rule rule, const GroupOptions& group, at::IntArrayRef sizes) {
  if (rule != Rule::Adafactor) {
    const StateNames names = state_names(rule, {group});
    std::vector<WholeState> states;
    for (int i = 0; i < names.count; ++i)
      states.push_back({names.name[i], std::nullopt});
    return states;
  }
  if (sizes.size() < 2) return {{"variance", std::nullopt}};
  std::vector<int64_t> rows = sizes.vec(), columns = sizes.vec();
  rows.back() = 1;
  columns[columns.size() - 2] = 1;
  return {{"row_var", rows}, {"col_var", columns}};
}

void update_whole(Rule rule, const std::vector<WholeUpdate>& updates, Shards& shards) {
  TESSERA_CHECK_VALUE(needs_whole(rule), "optim.update_whole", "the rule is one of Lamb, Muon and Adafactor");
  const c10::AutoGradMode no_grad(false);
  if (updates.empty()) return;
  if (rule == Rule::Lamb) return update_lamb(updates, shards);
  for (const WholeUpdate& update : updates) {
    if (rule == Rule::Adafactor)
      update_adafactor(update, shards);
    else
      update.group->use_muon ? update_matrix(update, shards) : update_beside(update);
  }
}

at::Tensor orthogonal(const at::Tensor& matrix, int64_t steps) {
  at::Tensor x = matrix.to(at::kBFloat16);
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.t();
  x = x / x.norm().clamp(kSmallestNorm);
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor gram = at::matmul(x, x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, kB, kC), x, kA);
  }
  return tall ? x.t() : x;
}

bool is_muon_matrix(const std::string& name, int64_t dims) {
  return dims >= 2 && name.find("embed") == std::string::npos && name.find("lm_head") == std::string::npos;
}

}  // namespace tessera::optim

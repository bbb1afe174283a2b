#include "tessera/engine/logical.h"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/checkpoint/node.h"
#include "tessera/optim/types.h"

namespace tessera::engine {

std::string kind_of(Engine& engine, Quantity quantity) {
  if (quantity == Quantity::Weight) return kWeight;
  if (quantity == Quantity::Master) return kMaster;
  const auto names = optim::state_names(engine.options().rule, engine.groups());
  return names.name[quantity == Quantity::State0 ? 0 : 1];
}

int number_of(const Engine& engine, const at::Tensor& param) {
  const auto& params = engine.params();
  const auto found = std::ranges::find_if(params, [&](const ParamSpec& spec) { return spec.tensor.is_same(param); });
  TESSERA_CHECK_VALUE(found != params.end(), "state", "this tensor is not a parameter of the engine");
  return static_cast<int>(found - params.begin());
}

std::vector<int64_t> whole_shape(const ParamSpec& spec, const shard::Form& form) {
  return spec.cut ? spec.cut->sizes : form.sizes;
}

std::vector<checkpoint::Slice> slice_of(const shard::CutPtr& cut) {
  if (cut == nullptr) return {};
  return {{cut->dim, cut->ranges}};
}

std::vector<checkpoint::Along> place_of(const Engine& engine, const ParamSpec& spec) {
  std::vector<checkpoint::Along> along;
  if (spec.cut != nullptr) return along;
  for (const comm::Axis axis : comm::kAxes)
    if (spec.varies.has(axis) && engine.mesh().size(axis) > 1)
      along.push_back({comm::axis_name(axis), engine.mesh().rank(axis), engine.mesh().size(axis)});
  return along;
}

std::vector<std::vector<checkpoint::Along>> places_of(const Engine& engine, const ParamSpec& spec) {
  std::vector<std::vector<checkpoint::Along>> all{{}};
  for (const checkpoint::Along& axis : place_of(engine, spec)) {
    std::vector<std::vector<checkpoint::Along>> longer;
    for (const auto& place : all) {
      for (int64_t i = 0; i < axis.of; ++i) {
        longer.push_back(place);
        longer.back().push_back({axis.axis, i, axis.of});
      }
    }
    all = std::move(longer);
  }
  return all;
}

std::string file_name_of(const Engine& engine, const ParamSpec& spec) {
  return spec.name + checkpoint::suffix_of(place_of(engine, spec));
}

std::string wrong_state(const std::string& family, const std::string& key, const at::Tensor& value) {
  if (!value.defined()) return "is an undefined tensor";
  if (key == "step") {
    if (value.numel() != 1) return c10::str("is one number, not a tensor of sizes ", value.sizes());
    const auto step = value.item<double>();
    const bool counts = step >= 0 && step <= static_cast<double>(checkpoint::Node::kLargestCount);
    return counts && step == std::floor(step) ? ""
                                              : c10::str("is a number of updates, a whole one from 0 on, not ", step);
  }
  const bool under_root =
      key == "exp_avg_sq" || key == "max_exp_avg_sq" || key == "square_avg" || (key == "sum" && family == "Adagrad");
  if (!under_root || value.numel() == 0 || !value.lt(0).any().item<bool>()) return "";
  return c10::str(
      "is a mean or sum of squares, of which the next update takes the root: none of it is below 0, and it has ",
      value.min().item<double>());
}

std::optional<Quantity> OptimizerStates::quantity(const std::string& key) const {
  const optim::Rule rule = engine_.options().rule;
  TESSERA_CHECK_BUILT(rule != optim::Rule::External, "state", "'", key,
                      "': states of an optimizer of your own are in the optimizer");
  const auto names = optim::state_names(rule, engine_.groups());
  const bool counts = rule != optim::Rule::Sgd;
  if (counts && key == "step") return std::nullopt;
  std::string there;
  for (int i = 0; i < names.count; ++i) {
    if (key == names.name[i]) return i == 0 ? Quantity::State0 : Quantity::State1;
    there += std::string(names.name[i]) + ", ";
  }
  there += counts ? "step" : there.empty() ? "none" : "";
  if (there.ends_with(", ")) there.resize(there.size() - 2);
  TESSERA_FAIL(c10::ValueError, "[state] no optimizer state '", key, "'; there are ", there);
}

at::Tensor OptimizerStates::get_full(int param, const std::string& key) const {
  const auto what = quantity(key);
  return what ? engine_.states().get_full(param, *what)
              : at::scalar_tensor(static_cast<double>(engine_.layout().param_step(param)), at::kFloat);
}

void OptimizerStates::check(const std::string& key, const at::Tensor& value) const {
  const std::string wrong = wrong_state(optim::family_of(optim::type_of(engine_.options().rule).name), key, value);
  TESSERA_CHECK_VALUE(wrong.empty(), "state", "'", key, "' ", wrong);
}

void OptimizerStates::set_full(int param, const std::string& key, const at::Tensor& value) const {
  const auto what = quantity(key);
  check(key, value);
  if (what)
    engine_.states().set_full(param, *what, value);
  else
    engine_.states().set_param_step(param, static_cast<int64_t>(value.item<double>()));
}

at::Tensor OptimizerStates::get_local(int param, const std::string& key) const {
  const auto what = quantity(key);
  if (!what) return get_full(param, key);
  const at::Tensor view = engine_.states().local_view(param, *what);
  return view.defined() ? view.to(at::kFloat) : view;
}

void OptimizerStates::set_local(int param, const std::string& key, const at::Tensor& value) const {
  const auto what = quantity(key);
  if (what) check(key, value);
  if (what)
    engine_.states().set_local(param, *what, value);
  else
    set_full(param, key, value);
}

std::string spread_of(const comm::Mesh& mesh) {
  std::string text;
  for (const comm::Axis axis : comm::kAxes)
    if (mesh.size(axis) > 1) text += c10::str(text.empty() ? "" : " x ", axis_name(axis), " ", mesh.size(axis));
  return text;
}

std::string buffer_name_of(const std::string& name, int place) {
  return name + checkpoint::suffix_of({{"rank", place, 0}});
}

zero::Ranks ranks_of(const Engine& engine) {
  zero::Ranks ranks(engine.mesh());
  if (!engine.params().empty()) ranks.device = engine.params().front().tensor.device();
  return ranks;
}

}  // namespace tessera::engine

#include "tessera/nn/recipe.h"

#include <unordered_map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/optim/whole.h"

namespace tessera::nn {
namespace {

class ScaledBy final : public Schedule {
 public:
  explicit ScaledBy(std::function<double(int64_t)> factor) : factor_(std::move(factor)) {}
  std::vector<double> rates(int64_t updates, const std::vector<double>& initial) override {
    const double factor = factor_(updates);
    std::vector<double> rates = initial;
    for (double& rate : rates)
      rate *= factor;
    return rates;
  }

 private:
  const std::function<double(int64_t)> factor_;
};

using Numbers = std::unordered_map<const void*, size_t>;

// The group that lists a tensor, by tensor.
Numbers listed_in(const std::vector<ParamGroup>& groups, const std::vector<engine::ParamSpec>& specs) {
  Numbers params, listed;
  for (size_t i = 0; i < specs.size(); ++i)
    params.emplace(specs[i].tensor.unsafeGetTensorImpl(), i);
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const at::Tensor& tensor : groups[number].params) {
      const auto known = params.find(tensor.unsafeGetTensorImpl());
      TESSERA_CHECK_VALUE(known != params.end(), "initialize", "param group ", number, " lists a tensor of shape ",
                          tensor.sizes(), " that is no parameter of the module");
      const auto [found, is_new] = listed.emplace(known->first, number);
      TESSERA_CHECK_VALUE(is_new || found->second == number, "initialize", "param groups ", found->second, " and ",
                          number, " both list '", specs[known->second].name, "'");
    }
  }
  return listed;
}

// Splits each group for Muon: the matrices, then the others. A `whole` model gets no empty group; stages have the same numbers.
std::vector<optim::GroupOptions> split_groups(const std::vector<ParamGroup>& groups,
                                              const optim::OptimizerOptions& optimizer, bool whole,
                                              std::vector<engine::ParamSpec>& specs) {
  std::vector<optim::GroupOptions> options;
  std::vector<std::pair<engine::ParamSpec*, int>> numbers;
  for (size_t number = 0; number <= groups.size(); ++number) {
    const std::optional<bool> chosen = number < groups.size() ? groups[number].use_muon : std::nullopt;
    for (const bool use : {true, false}) {
      bool trains = false;
      for (engine::ParamSpec& spec : specs) {
        if (spec.joins != static_cast<int>(number)) continue;
        if (chosen.value_or(optim::is_muon_matrix(spec.name, spec.tensor.dim())) != use) continue;
        numbers.emplace_back(&spec, static_cast<int>(options.size()));
        trains = trains || spec.group >= 0;
      }
      if (!trains && whole) {  // a parameter that would join it has no group
        for (auto& [spec, place] : numbers)
          if (place == static_cast<int>(options.size())) place = -1;
        continue;
      }
      options.push_back(use ? optimizer.defaults : *optimizer.others);
      if (number < groups.size() && groups[number].set) groups[number].set(options.back());
      options.back().use_muon = use;
    }
  }
  for (const auto& [spec, place] : numbers) {
    spec->joins = place;
    if (spec->group >= 0) spec->group = place;
  }
  return options;
}

}  // namespace

std::shared_ptr<Schedule> scaled_by(std::function<double(int64_t)> factor) {
  TESSERA_CHECK_VALUE(factor != nullptr, "schedule", "scaled_by: the function is empty");
  return std::make_shared<ScaledBy>(std::move(factor));
}

std::vector<optim::GroupOptions> group_params(const std::vector<ParamGroup>& groups,
                                              const optim::OptimizerOptions& optimizer, bool whole,
                                              std::vector<engine::ParamSpec>& specs) {
  if (groups.empty() && optimizer.rule != optim::Rule::Muon) return {optimizer.defaults};
  const Numbers listed = listed_in(groups, specs);
  std::vector<size_t> taken(groups.size() + 1);
  for (engine::ParamSpec& spec : specs) {
    size_t number = 0;
    for (; number < groups.size(); ++number) {
      const auto in_list = listed.find(spec.tensor.unsafeGetTensorImpl());
      if (in_list != listed.end() && in_list->second == number) break;
      if (groups[number].takes && groups[number].takes(spec.name, spec.tensor)) break;
    }
    ++taken[number];
    if (number < groups.size() && groups[number].frozen) {
      spec.tensor.requires_grad_(false);
      spec.group = -1;
    }
    spec.joins = static_cast<int>(number);
    if (spec.group >= 0) spec.group = spec.joins;
  }
  for (size_t number = 0; number < groups.size(); ++number)
    TESSERA_CHECK_VALUE(taken[number] > 0 || !whole, "initialize", "param group ", number,
                        " takes no parameter of the module; those before it may have taken what it is for");
  if (optimizer.rule == optim::Rule::Muon) return split_groups(groups, optimizer, whole, specs);
  std::vector<optim::GroupOptions> options(groups.size() + 1, optimizer.defaults);
  for (size_t number = 0; number < groups.size(); ++number)
    if (groups[number].set) groups[number].set(options[number]);
  return options;
}

}  // namespace tessera::nn

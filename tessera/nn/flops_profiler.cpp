#include "tessera/nn/flops_profiler.h"

#include <functional>
#include <unordered_map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/scope.h"
#include "tessera/nn/sequence_layers.h"

namespace tessera::nn {
namespace {

// The name that Python's class has: "torch::nn::LinearImpl" is Linear.
std::string kind_of(const torch::nn::Module& module) {
  std::string name = module.name();
  const size_t end = std::min(name.find('<'), name.size());
  if (const size_t colons = name.rfind("::", end); colons != std::string::npos) name.erase(0, colons + 2);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

using Modules = std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;

Modules distinct_modules(const torch::nn::Module& model) {
  Modules found;
  std::unordered_map<const torch::nn::Module*, bool> seen;
  for (const auto& item : model.named_modules())
    if (seen.emplace(item.value().get(), true).second) found.emplace_back(item.key(), item.value());
  return found;
}

}  // namespace

struct FlopsProfiler::State {
  std::shared_ptr<torch::nn::Module> model;
  std::shared_ptr<engine::FlopsProfile> profile;

  // Calls f with every module that says when it runs, and its row.
  void each_holder(const std::function<void(ScopeHolder& holder, int row)>& f) const {
    const auto layers = gathered_layers(*model);
    const Modules modules = distinct_modules(*model);
    for (size_t i = 0; i < modules.size(); ++i) {
      const auto layer = layers.find(modules[i].second.get());
      ScopeHolder* const holder =
          layer != layers.end() ? layer->second : dynamic_cast<ScopeHolder*>(modules[i].second.get());
      if (holder != nullptr) f(*holder, static_cast<int>(i));
    }
  }
};

FlopsProfiler::FlopsProfiler(std::shared_ptr<torch::nn::Module> model, double recompute)
    : state_(std::make_shared<State>()) {
  TESSERA_CHECK_VALUE(model != nullptr, "flops_profiler", "the model is null");
  state_->model = std::move(model);
  state_->profile = std::make_shared<engine::FlopsProfile>(recompute);
}

FlopsProfiler::Counting FlopsProfiler::start() {
  std::vector<engine::ProfileRow> rows;
  std::vector<engine::FlopsProfile::Weight> weights;
  for (const auto& [name, module] : distinct_modules(*state_->model)) {
    for (const at::Tensor& param : module->parameters(/*recurse=*/false))
      weights.push_back({param, static_cast<int>(rows.size())});
    std::unordered_map<const void*, int64_t> sizes;  // a tied parameter counts once, as in Python
    for (const at::Tensor& param : module->parameters())
      sizes.emplace(param.unsafeGetTensorImpl(), param.numel());
    int64_t parameters = 0;
    for (const auto& [param, size] : sizes)
      parameters += size;
    rows.push_back({.name = name, .kind = kind_of(*module), .parameters = parameters});
  }
  state_->profile->start(std::move(rows), std::move(weights));
  Counting counting(state_);
  state_->each_holder([&](ScopeHolder& holder, int row) { holder.join({state_->profile, row}); });
  return counting;
}

void FlopsProfiler::Counting::stop() {
  const auto state = std::exchange(state_, nullptr);
  if (state == nullptr) return;
  state->profile->stop();
  state->each_holder([&](ScopeHolder& holder, int) { holder.leave(state->profile); });
}

const engine::FlopsProfile& FlopsProfiler::profile() const {
  return *state_->profile;
}

void FlopsProfiler::enter_model() {
  state_->profile->enter(0);
}

void FlopsProfiler::leave_model() {
  state_->profile->leave(0);
}

}  // namespace tessera::nn

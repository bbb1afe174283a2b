#include "tessera/nn/scope.h"

#include <c10/util/accumulate.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/nn/construction.h"
#include "tessera/nn/sequence_layers.h"
#include "tessera/shard/placement.h"

namespace tessera::nn {

ProfiledCall::ProfiledCall(const std::vector<ProfiledAs>& profiles) {
  for (const ProfiledAs& as : profiles)
    if (const auto profile = as.profile.lock()) {
      profile->enter(as.row);
      entered_.emplace_back(profile, as.row);
    }
}

ProfiledCall::~ProfiledCall() {
  for (const auto& [profile, row] : entered_)
    profile->leave(row);
}

ModuleScope::ModuleScope(const ScopeHandle& link) : profiled_(link.profiles), module_(link.module) {
  if (module_ < 0) return;
  engine_ = link.engine.lock();
  if (engine_ == nullptr || engine_->destroyed()) {
    engine_.reset();
    return;
  }
  wants_ = engine_->modules().enter(module_);
}

ModuleScope::~ModuleScope() {
  if (engine_ == nullptr) return;
  try {
    engine_->modules().abort(module_);
  } catch (const std::exception&) {
    // The exception that ends the forward says more.
  }
}

void ModuleScope::note_inputs(const std::vector<at::Tensor>& inputs) {
  engine_->modules().note_inputs(inputs);
}

void ModuleScope::finish(const std::vector<at::Tensor>& outputs, bool hides) {
  const auto engine = std::move(engine_);
  if (engine != nullptr) engine->modules().leave(module_, outputs, hides);
}

namespace {

using TensorKeys = std::unordered_set<const void*>;

void add_params(const torch::nn::Module& module, TensorKeys& tensors) {
  for (const at::Tensor& param : module.parameters())
    tensors.insert(param.unsafeGetTensorImpl());
}

// How many modules have each parameter.
std::unordered_map<const void*, int> owners_in(const torch::nn::Module& module) {
  std::unordered_map<const void*, int> owners;
  module.apply([&](const torch::nn::Module& part) {
    for (const at::Tensor& param : part.parameters(/*recurse=*/false))
      ++owners[param.unsafeGetTensorImpl()];
  });
  return owners;
}

// The parameters that a layer of a plain Sequential gathers around its call: those that nobody reads elsewhere.
class OwnParams {
 public:
  explicit OwnParams(const torch::nn::Module& root) : layers_(gathered_layers(root)), owners_(owners_in(root)) {}
  ScopeHolder* layer(const torch::nn::Module* part) const {
    const auto found = layers_.find(part);
    return found == layers_.end() ? nullptr : found->second;
  }
  // `is_alone`: whether a part of the layer, by its path there, says itself when it runs.
  std::vector<at::Tensor> of(const torch::nn::Module& layer,
                             const std::function<bool(const std::string& path)>& is_alone) const {
    const auto owners = owners_in(layer);
    TensorKeys inner;
    for (const auto& item : layer.named_modules("", /*include_self=*/false)) {
      const auto* const part = item.value().get();
      const bool says = dynamic_cast<const ScopeHolder*>(part) != nullptr || layers_.contains(part);
      if (says && is_alone(item.key())) add_params(*part, inner);
    }
    std::vector<at::Tensor> own;
    for (const at::Tensor& param : layer.parameters()) {
      const void* const key = param.unsafeGetTensorImpl();
      if (!inner.contains(key) && owners.at(key) == owners_.at(key)) own.push_back(param);
    }
    return own;
  }

 private:
  const std::unordered_map<const torch::nn::Module*, GatheredLayer*> layers_;
  const std::unordered_map<const void*, int> owners_;
};

}  // namespace

ScopeHandle connect_scopes(torch::nn::Module& module, const std::shared_ptr<engine::Engine>& engine,
                           const std::vector<std::string>& leaves) {
  const auto in_leaf = [&](const std::string& path) {
    return std::any_of(leaves.begin(), leaves.end(), [&](const std::string& leaf) {
      return path != leaf && (leaf.empty() || path.starts_with(leaf + "."));
    });
  };
  std::unordered_map<const void*, int> index;
  const auto& specs = engine->params();
  for (size_t i = 0; i < specs.size(); ++i)
    index[specs[i].tensor.unsafeGetTensorImpl()] = static_cast<int>(i);
  std::unordered_set<int> covered;
  std::unordered_set<const void*> seen;
  const OwnParams own(module);
  for (const auto& item : module.named_modules()) {
    const auto& part = item.value();
    auto* const layer = own.layer(part.get());
    auto* holder = layer != nullptr ? layer : dynamic_cast<ScopeHolder*>(part.get());
    if (holder == nullptr || !seen.insert(holder).second) continue;
    if (in_leaf(item.key())) {
      holder->connect({});
      continue;
    }
    const auto is_alone = [&](const std::string& path) {
      return !in_leaf(item.key().empty() ? path : item.key() + "." + path);
    };
    std::vector<int> params;
    for (const at::Tensor& p : layer != nullptr ? own.of(*part, is_alone) : part->parameters()) {
      const auto known = index.find(p.unsafeGetTensorImpl());
      if (known == index.end()) continue;  // the parameter came later, and no group has it
      params.push_back(known->second);
      covered.insert(params.back());
    }
    holder->connect({engine, engine->modules().add(params)});
  }
  std::vector<int> rest;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!covered.contains(static_cast<int>(i))) rest.push_back(static_cast<int>(i));
  }
  return {engine, engine->modules().add(rest)};
}

namespace {

// The path of the module around `path`, itself included, that says when it runs; none where no module does.
std::optional<std::string> runs_with(const std::unordered_set<std::string>& holders, std::string path) {
  while (!holders.contains(path)) {
    if (path.empty()) return {};
    const size_t dot = path.rfind('.');
    path.resize(dot == std::string::npos ? 0 : dot);
  }
  return path;
}

// How many elements of a module's own parameters another module has, too.
int64_t tied_elements(const torch::nn::Module& part, const std::unordered_map<const void*, int>& owners,
                      const std::unordered_map<const void*, int64_t>& elements) {
  int64_t tied = 0;
  for (const at::Tensor& param : part.parameters(/*recurse=*/false))
    if (owners.at(param.unsafeGetTensorImpl()) > 1) tied += elements.at(param.unsafeGetTensorImpl());
  return tied;
}

}  // namespace

std::string units_text(const torch::nn::Module& module, const engine::Engine& engine) {
  const int stage = engine.options().zero.stage;
  if (!shard::placements_of_stage(stage).shards_params())
    return c10::str("every rank has all parameters whole: zero_optimization.stage ", stage, " partitions none");
  std::unordered_map<const void*, int64_t> elements;
  for (const engine::ParamSpec& spec : engine.params())
    elements[spec.tensor.unsafeGetTensorImpl()] =
        c10::multiply_integers(spec.cut ? spec.cut->sizes : spec.tensor.sizes().vec());
  std::unordered_set<std::string> holders, in_sequences;
  const auto parts = module.named_modules();
  const OwnParams of_sequences(module);
  const auto owners = owners_in(module);
  for (const auto& item : parts) {
    const ScopeHolder* const layer = of_sequences.layer(item.value().get());
    const auto* holder = layer != nullptr ? layer : dynamic_cast<const ScopeHolder*>(item.value().get());
    if (holder == nullptr || holder->scope().engine.expired()) continue;
    holders.insert(item.key());
    if (layer != nullptr) in_sequences.insert(item.key());
  }
  const auto called = [](const std::string& path) { return path.empty() ? "the model" : path; };
  std::string text;
  for (const auto& item : parts) {
    int64_t own = 0;
    for (const at::Tensor& param : item.value()->parameters(/*recurse=*/false))
      own += elements[param.unsafeGetTensorImpl()];
    if (own == 0) continue;
    const auto with = runs_with(holders, item.key());
    text +=
        c10::str(text.empty() ? "" : "\n", called(item.key()), " (", item.value()->name(), "), ", own, " elements: ");
    if (!with)
      text += "for the whole forward, as neither it nor a module around it says when it runs: tessera::nn::unit() does";
    else
      text += *with == item.key() ? "while it runs" : "while " + called(*with) + " runs, which it is a part of";
    const int64_t tied = tied_elements(*item.value(), owners, elements);
    if (with && in_sequences.contains(*with) && tied > 0)
      text += c10::str("; ", tied, " of them for the whole forward, as another module has them, too");
  }
  return text;
}

GatheredParameters::GatheredParameters(engine::Engine& engine, const std::vector<at::Tensor>& params,
                                       int modifier_rank) {
  std::vector<int> numbers;
  std::unordered_set<const void*> wanted;
  for (const at::Tensor& p : params)
    wanted.insert(p.unsafeGetTensorImpl());
  const auto& specs = engine.params();
  for (size_t i = 0; i < specs.size(); ++i) {
    if (wanted.contains(specs[i].tensor.unsafeGetTensorImpl())) numbers.push_back(static_cast<int>(i));
  }
  const zero::Writes writes = writes_of(modifier_rank);
  engine.check_one_thread("GatheredParameters");
  engine.regions().open(numbers, writes, modifier_rank);
  close_ = [&engine, life = engine.life(), numbers, writes, modifier_rank] {
    if (!life.expired() && !engine.destroyed()) engine.regions().close(numbers, writes, modifier_rank);
  };
}

GatheredParameters::GatheredParameters(Construction& building, const std::vector<at::Tensor>& params,
                                       int modifier_rank) {
  building.gather(params, modifier_rank);
  close_ = [&building, params, modifier_rank] { building.release(params, modifier_rank); };
}

GatheredParameters::~GatheredParameters() {
  try {
    close();
  } catch (const c10::Error& error) {  // close() throws it
    TORCH_WARN("[zero] GatheredParameters: ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    TORCH_WARN("[zero] GatheredParameters: ", error.what());
  }
}

void GatheredParameters::close() {
  if (const auto close = std::exchange(close_, nullptr)) close();
}

}  // namespace tessera::nn

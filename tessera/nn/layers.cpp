#include "tessera/nn/layers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/utils.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <regex>
#include <set>
#include <sstream>

#include "tessera/nn/recompute.h"
#include "tessera/pipeline/partition.h"

namespace tessera::nn {

Tensors detail::call_any(torch::nn::AnyModule& module, const std::string& name, const Tensors& x) {
  TESSERA_CHECK_VALUE(!x.empty() && x.size() <= 3, "pipeline", "layer ", name, " is an AnyModule and got ", x.size(),
                      " tensors; it can take 1 to 3: add the module itself");
  auto result = x.size() == 1   ? module.any_forward(x[0])
                : x.size() == 2 ? module.any_forward(x[0], x[1])
                                : module.any_forward(x[0], x[1], x[2]);
  if (const auto* one = result.try_get<at::Tensor>()) return {*one};
  if (auto* several = result.try_get<Tensors>()) return std::move(*several);
  Tensors tensors;
  if (const auto* two = result.try_get<std::tuple<at::Tensor, at::Tensor>>()) append_tensors(*two, tensors);
  if (const auto* three = result.try_get<std::tuple<at::Tensor, at::Tensor, at::Tensor>>())
    append_tensors(*three, tensors);
  TESSERA_CHECK_VALUE(!tensors.empty(), "pipeline", "layer ", name,
                      " is an AnyModule that returns neither a tensor, a vector nor a tuple of two or three: add the "
                      "module itself");
  return tensors;
}

Layers::Layers(const torch::nn::Sequential& sequential) {
  for (const torch::nn::AnyModule& module : *sequential)
    add(module);
}

Layers& Layers::add(const torch::nn::AnyModule& module) {
  TESSERA_CHECK_VALUE(!module.is_empty(), "pipeline", "a layer is a null module");
  Layer layer{.name = class_of(*module.ptr()), .module = module.ptr()};
  layer.call = [any = module, name = layer.name](const Tensors& x) mutable { return detail::call_any(any, name, x); };
  list_.push_back(std::move(layer));
  return *this;
}

std::string Layers::class_of(const torch::nn::Module& module) {
  std::string name = module.name();
  if (const size_t colon = name.rfind(':'); colon != std::string::npos) name.erase(0, colon + 1);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

namespace {

// The stage that has a layer: that of its part.
int stage_of(const std::vector<int>& bounds, int stages, int layer) {
  int part = 0;
  while (bounds[part + 1] <= layer)
    ++part;
  return part % stages;
}

void check_listed_once(const Layers& layers) {
  std::vector<const void*> modules;
  for (int number = 0; number < layers.size(); ++number)
    modules.push_back(layers[number].module.get());
  pipeline::check_listed_once(
      modules, [&](int number) { return layers[number].name; }, "use Layers::tied() with one key in each place");
}

// Refuses a parameter in layers of two stages: it would be two, each with a part of the gradient.
void refuse_ties(const Layers& layers, const std::vector<int>& bounds, int stages) {
  std::map<const void*, int> first;  // layer, by parameter
  for (int number = 0; number < layers.size(); ++number) {
    if (!layers[number].module) continue;
    for (const auto& param : layers[number].module->named_parameters()) {
      const auto [found, fresh] = first.try_emplace(param.value().unsafeGetTensorImpl(), number);
      const int here = stage_of(bounds, stages, number), there = stage_of(bounds, stages, found->second);
      TESSERA_CHECK_BUILT(fresh || here == there, "pipeline", "parameter '", param.key(), "' is in layers ",
                          found->second, " (", layers[found->second].name, ") and ", number, " (", layers[number].name,
                          "), which are on the stages ", there, " and ", here,
                          ": add them with Layers::tied(), or cut the list so that one stage has both");
    }
  }
}

void build(Layer& layer) {
  if (const auto make = std::exchange(layer.build, nullptr)) make(layer);
}

// Builds copies of layers that are not built, and leaves the generator as it was.
class Trial {
 public:
  Trial() = default;
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;
  ~Trial() {
    if (!state_.defined()) return;
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_state(state_);
  }
  Layer built(Layer layer) {
    if (layer.build && !state_.defined()) {
      const std::scoped_lock lock(generator_.mutex());
      state_ = generator_.get_state();
    }
    build(layer);
    return layer;
  }

 private:
  at::Generator generator_ = at::detail::getDefaultCPUGenerator();
  at::Tensor state_;
};

int64_t trained_elements(const Layer& layer) {
  int64_t count = 0;
  if (!layer.module) return count;
  for (const at::Tensor& param : layer.module->parameters())
    if (param.requires_grad()) count += param.numel();
  return count;
}

pipeline::ListedLayers::Predicate matcher_of(const std::string& pattern) try {
  return [regex = std::regex(pattern, std::regex::icase)](const std::string& name) {
    return std::regex_search(name, regex);
  };
} catch (const std::regex_error& error) {
  TESSERA_FAIL(c10::ValueError, "[pipeline] '", pattern,
               "' of a partition method is no regular expression: ", error.what());
}

std::map<std::string, std::vector<int>> ties_of(const Layers& layers, const std::vector<int>& bounds, int stages) {
  std::map<std::string, std::set<int>> found;
  for (int number = 0; number < layers.size(); ++number)
    if (!layers[number].key.empty()) found[layers[number].key].insert(stage_of(bounds, stages, number));
  std::map<std::string, std::vector<int>> ties;
  for (const auto& [key, of] : found)
    if (of.size() > 1) ties[key].assign(of.begin(), of.end());
  return ties;
}

int first_place(const Layers& layers, const std::string& key) {
  int number = 0;
  while (layers[number].key != key)
    ++number;
  return number;
}

}  // namespace

StageLayers::StageLayers(Layers layers, std::vector<int> bounds, int stages, int stage, std::optional<uint64_t> seed)
    : torch::nn::Module("StageLayers"),
      ties_(ties_of(layers, bounds, stages)),
      bounds_(std::move(bounds)),
      stages_(stages),
      stage_(stage) {
  check_listed_once(layers);
  refuse_ties(layers, bounds_, stages);
  const auto list = register_module("layers", std::make_shared<torch::nn::Module>("Layers"));
  std::shared_ptr<torch::nn::Module> tied_list;
  std::map<std::string, std::shared_ptr<torch::nn::Module>> tied;
  for (int number = 0; number < layers.size(); ++number) {
    if (stage_of(bounds_, stages, number) != stage) continue;
    Layer layer = layers[number];
    const auto known = tied.find(layer.key);
    if (known != tied.end()) {
      layer.bind(layer, known->second);
    } else {
      if (seed && layer.build)
        torch::manual_seed(*seed + (layer.key.empty() ? number : first_place(layers, layer.key)));
      build(layer);
      if (!layer.key.empty()) {
        if (tied.empty()) tied_list = register_module("tied_modules", std::make_shared<torch::nn::Module>("Tied"));
        tied[layer.key] = tied_list->register_module(layer.key, layer.module);
      } else if (layer.module) {
        list->register_module(std::to_string(number), layer.module);
      }
    }
    layers_.emplace(number, std::move(layer));
  }
}

Tensors StageLayers::run(int chunk, Tensors x, int64_t interval, const RecomputeOptions& options,
                         const std::optional<std::vector<std::string>>& classes) {
  const int part = chunk * stages_ + stage_, end = bounds_[part + 1];
  if (interval <= 0 || !c10::GradMode::is_enabled()) return run_some(bounds_[part], end, std::move(x));
  for (int first = bounds_[part]; first < end;) {
    const int last = static_cast<int>(std::min<int64_t>(end, first + interval));
    const auto some = [this, first, last](const Tensors& inputs) { return run_some(first, last, inputs); };
    x = is_recomputed(first, last, classes) ? recompute(some, x, options) : some(x);
    first = last;
  }
  return x;
}

Tensors StageLayers::run_some(int first, int last, Tensors x) {
  for (int number = first; number < last; ++number)
    x = layers_.at(number).call(x);
  return x;
}

std::string StageLayers::describe() const {
  std::ostringstream text;
  const int chunks = (static_cast<int>(bounds_.size()) - 1) / stages_;
  for (int part = 0; part < chunks * stages_; ++part) {
    text << (part == 0 ? "" : "\n") << "stage " << part % stages_;
    if (chunks > 1) text << " chunk " << part / stages_;
    for (int number = bounds_[part]; number < bounds_[part + 1]; ++number) {
      text << (number == bounds_[part] ? ": " : ", ") << number;
      if (const auto layer = layers_.find(number); layer != layers_.end()) text << ": " << layer->second.name;
    }
  }
  return text.str();
}

// By class, or whether layers of this run are trained. Tied modules do not count as such, as in Python.
bool StageLayers::is_recomputed(int first, int last, const std::optional<std::vector<std::string>>& classes) const {
  if (classes) {
    for (int number = first; number < last; ++number)
      if (std::ranges::find(*classes, layers_.at(number).name) == classes->end()) return false;
    return true;
  }
  for (int number = first; number < last; ++number) {
    const Layer& layer = layers_.at(number);
    if (!layer.module || !layer.key.empty()) continue;
    for (const at::Tensor& param : layer.module->parameters())
      if (param.requires_grad()) return true;
  }
  return false;
}

engine::UnitNames units_of_layers(const torch::nn::Module& module) {
  engine::UnitNames units;
  for (const auto& param : module.named_parameters()) {
    const std::string& name = param.key();
    units[name] = name.substr(0, name.find('.', name.find('.') + 1));
  }
  return units;
}

std::vector<int> bounds_of(const std::string& method, int parts, const Layers& layers) {
  Trial trial;
  return pipeline::bounds_of(
      method, parts,
      {.count = layers.size(),
       .trained_elements = [&](int number) { return trained_elements(trial.built(layers[number])); },
       .class_name = [&](int number) { return trial.built(layers[number]).name; },
       .matcher = &matcher_of});
}

}  // namespace tessera::nn

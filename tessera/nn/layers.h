// A model as a list of layers, from which nn::Pipeline makes stages.
//
//   tessera::nn::Layers layers;
//   layers.add(torch::nn::Embedding(256, 64));             // a module; every rank has built it
//   for (int i = 0; i < 8; ++i)
//     layers.build([&] { return Block(options); });        // built on the stage that has it only
//   layers.add([](const at::Tensor& x) { return x * 2; });  // a function without parameters
//   layers.tied("embedding", [] { return torch::nn::Embedding(256, 64); });  // one set of weights in several places
//   layers.tied("embedding", [] { return torch::nn::Embedding(256, 64); },
//               [](torch::nn::Embedding& e, const at::Tensor& x) { return at::linear(x, e->weight); });
//
// A layer takes the tensors that the one before it returned, each as an argument of its forward, or all of them as a
// std::vector<at::Tensor>. It returns a tensor or any nesting of tensors (outputs.h), which the next one gets flat.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/engine/unit_policy.h"
#include "tessera/nn/holder.h"
#include "tessera/nn/outputs.h"
#include "tessera/nn/recompute.h"

namespace tessera::nn {

using Tensors = std::vector<at::Tensor>;

namespace detail {

inline constexpr size_t kMostArguments = 6;

template <size_t>
using Argument = const at::Tensor&;

template <class F, size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return std::is_invocable_v<F&, Argument<I>...>;
}

template <class F, size_t... I>
Tensors flat_result(F& f, const Tensors& x, std::index_sequence<I...>) {
  Tensors tensors;
  append_tensors(f(x[I]...), tensors);
  return tensors;
}

// Sets result to f(x[0], x[1], ...) where f takes so many tensors.
template <size_t N, class F>
bool try_with(F& f, const Tensors& x, Tensors& result) {
  if constexpr (takes<F>(std::make_index_sequence<N>())) {
    if (x.size() != N) return false;
    result = flat_result(f, x, std::make_index_sequence<N>());
    return true;
  } else {
    return false;
  }
}

template <class F, size_t... N>
constexpr bool takes_some(std::index_sequence<N...>) {
  return (takes<F>(std::make_index_sequence<N + 1>()) || ...);
}

template <class F, size_t... N>
Tensors call_with(const std::string& name, F& f, const Tensors& x, std::index_sequence<N...> counts) {
  Tensors result;
  if constexpr (std::is_invocable_v<F&, const Tensors&>) {
    append_tensors(f(x), result);
  } else {
    static_assert(takes_some<F>(counts), "a layer takes tensors, or a std::vector<at::Tensor>");
    const bool called = (try_with<N + 1>(f, x, result) || ...);
    TESSERA_CHECK_VALUE(called, "pipeline", "layer ", name, " cannot take the ", x.size(),
                        " tensors that the layer before it returned");
  }
  return result;
}

Tensors call_any(torch::nn::AnyModule& module, const std::string& name, const Tensors& x);

template <class L>
auto pointer_of(const L& module) {
  if constexpr (requires { module.ptr(); }) {
    return module_of(module);
  } else {
    return module;
  }
}

// The function forward(module, x...) of the tensors.
template <class Holder, class F>
struct Bound {
  Holder module;
  F forward;
  template <class... X>
  auto operator()(const X&... x) -> decltype(forward(module, x...)) {
    return forward(module, x...);
  }
};
struct OwnForward {
  template <class Holder, class... X>
  auto operator()(Holder& module, const X&... x) const -> decltype(module->forward(x...)) {
    return module->forward(x...);
  }
};

}  // namespace detail

// A place in the list.
struct Layer {
  std::string name = {};                           // the layer's class, as "Linear"
  std::shared_ptr<torch::nn::Module> module = {};  // null: a function, or not built yet
  std::function<void(Layer&)> build = {};          // sets module and call; none: built
  std::function<Tensors(const Tensors&)> call = {};
  std::string key = {};  // of a module that stands in several places
  std::function<void(Layer&, const std::shared_ptr<torch::nn::Module>&)> bind = {};  // binds to another place's module
};

class Layers {
 public:
  Layers() = default;
  // Every module of a Sequential is a layer.
  explicit Layers(const torch::nn::Sequential& sequential);

  Layers& add(const torch::nn::AnyModule& module);
  // A module holder (TORCH_MODULE) or a std::shared_ptr to a module; else a function, see call_with().
  template <class L>
  Layers& add(L layer) {
    list_.push_back(made_of(std::move(layer)));
    return *this;
  }
  // `make()` returns a module holder or a std::shared_ptr to a module.
  template <class F>
  Layers& build(F make) {
    Layer layer;
    layer.build = [make = std::move(make)](Layer& place) { place = made_of(make()); };
    list_.push_back(std::move(layer));
    return *this;
  }

  // Adds a module in several places, each with this `key`: one set of weights. Stages that have it hold a copy each; they
  // start equal, get the sum of their gradients, and count once in the norm. All its parameters are tied.
  // `forward(module, tensors...)`: what the module does in this place; without one, its own forward.
  template <class F>
  Layers& tied(const std::string& key, F make) {
    return tied(key, std::move(make), detail::OwnForward());
  }
  template <class F, class G>
  Layers& tied(const std::string& key, F make, G forward) {
    using Holder = std::decay_t<decltype(make())>;
    using Module = typename decltype(detail::pointer_of(std::declval<Holder>()))::element_type;
    Layer layer;
    layer.key = key;
    layer.bind = [key, forward = std::move(forward)](Layer& place, const std::shared_ptr<torch::nn::Module>& module) {
      TESSERA_CHECK_VALUE(module != nullptr, "pipeline", "tied layer '", key, "' is a null module");
      auto own = std::dynamic_pointer_cast<Module>(module);
      TESSERA_CHECK_VALUE(own, "pipeline", "tied layers '", key, "' are modules of two classes, one of them ",
                          class_of(*module));
      place.name = class_of(*module);
      place.module = module;
      place.call = [name = place.name,
                    bound = detail::Bound<Holder, G>{Holder(std::move(own)), forward}](const Tensors& x) mutable {
        return detail::call_with(name, bound, x, std::make_index_sequence<detail::kMostArguments>());
      };
    };
    layer.build = [make = std::move(make), bind = layer.bind](Layer& place) {
      bind(place, detail::pointer_of(make()));
    };
    list_.push_back(std::move(layer));
    return *this;
  }

  int size() const { return static_cast<int>(list_.size()); }
  Layer& operator[](int number) { return list_[number]; }
  const Layer& operator[](int number) const { return list_[number]; }

 private:
  template <class M>
  static Layer of_module(const std::shared_ptr<M>& module) {
    TESSERA_CHECK_VALUE(module != nullptr, "pipeline", "a layer is a null module");
    Layer layer{.name = class_of(*module), .module = module};
    if constexpr (std::is_base_of_v<torch::nn::SequentialImpl, M>) {
      layer.call = [m = module.get(), name = layer.name](const Tensors& x) {
        TESSERA_CHECK_VALUE(x.size() == 1, "pipeline", "layer ", name, " takes one tensor, got ", x.size());
        return Tensors{m->forward(x[0])};
      };
    } else {
      layer.call = [m = module.get(), name = layer.name](const Tensors& x) {
        detail::Bound<M*, detail::OwnForward> forward{m, {}};
        return detail::call_with(name, forward, x, std::make_index_sequence<detail::kMostArguments>());
      };
    }
    return layer;
  }
  template <class M>
  static Layer made_of(const std::shared_ptr<M>& module) {
    return of_module(module);
  }
  template <class L>
  static Layer made_of(L layer) {
    if constexpr (requires { layer.ptr(); }) {
      return of_module(detail::module_of(layer));
    } else {
      return {.name = "function", .call = [f = std::move(layer)](const Tensors& x) mutable {
                return detail::call_with("of a function", f, x, std::make_index_sequence<detail::kMostArguments>());
              }};
    }
  }
  static std::string class_of(const torch::nn::Module& module);

  std::vector<Layer> list_;
};

// The layers of one stage: a module whose parameters have the names that they have in the list, whatever the number of stages:
// "layers.3.weight" is of layer 3, "tied_modules.KEY.weight" of a tied one.
class StageLayers : public torch::nn::Module {
 public:
  // Builds the layers of this stage. `bounds`: of all parts, part p is chunk p / stages of stage p % stages.
  // `seed`: layer i is built after torch::manual_seed(*seed + i), a tied one with the number of its first place.
  // Not-implemented error where a parameter is in layers of two stages that are not tied.
  StageLayers(Layers layers, std::vector<int> bounds, int stages, int stage, std::optional<uint64_t> seed);

  // The outputs of the layers of `chunk`, of which `x` are the inputs. `interval`: activations are kept after every so many layers
  // that have parameters, and the backward computes those in between again (recompute.h); 0: all activations are kept. `classes`: of
  // layers that are computed again, where all of a run are of these; without it those with trained parameters are.
  Tensors run(int chunk, Tensors x, int64_t interval = 0, const RecomputeOptions& options = {},
              const std::optional<std::vector<std::string>>& classes = {});
  // Which stage has which layers, a line each; the classes are those of this stage's.
  std::string describe() const;
  // The stages that have a tied module, ascending, by its key, where they are several. The same on all stages.
  const std::map<std::string, std::vector<int>>& ties() const { return ties_; }

 private:
  Tensors run_some(int first, int last, Tensors x);
  bool is_recomputed(int first, int last, const std::optional<std::vector<std::string>>& classes) const;

  std::map<int, Layer> layers_;  // of this stage, by place in the list
  std::map<std::string, std::vector<int>> ties_;
  std::vector<int> bounds_;
  int stages_, stage_;
};

// Names a unit for each layer and each tied module (UnitPolicy).
engine::UnitNames units_of_layers(const torch::nn::Module& module);

// pipeline::bounds_of() for these layers. Those that are not built are for all methods but "uniform", one at a time.
std::vector<int> bounds_of(const std::string& method, int parts, const Layers& layers);

}  // namespace tessera::nn

// Modules whose forward the engine sees: what torch::nn lacks. Needed for partitioned parameters (stage 3) only, and
// harmless elsewhere.
//
//   struct BlockImpl : tessera::nn::Hooked<BlockImpl, at::Tensor(at::Tensor)> {
//     at::Tensor forward_impl(at::Tensor x);            // what forward would have been
//   };
//   TORCH_MODULE(Block);                                // works in Sequential, ModuleList, AnyModule, holders; of
//                                                       // those, at<BlockImpl>(i) alone does not compile: use ptr(i)
//
//   blocks->push_back(tessera::nn::unit(Block(width)));  // the same of a class that knows nothing of Tessera
//
// The parameters below a Hooked module, or a unit(), are gathered around its forward and its backward. Parameters that are below
// none are gathered for the whole of Engine::forward.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/outputs.h"
#include "tessera/nn/scope.h"

namespace tessera::nn {

// Calls f() as one call of a module with these arguments.
template <class R, class F, class... A>
R run_in_scope(const ScopeHandle& scope, const F& f, const A&... arguments) {
  ModuleScope call(scope);
  if (call.wants_tensors()) {
    std::vector<at::Tensor> inputs;
    (append_tensors(arguments, inputs), ...);
    call.note_inputs(inputs);
  }
  R result = f();
  std::vector<at::Tensor> outputs;
  if (call.wants_tensors()) append_tensors(result, outputs);
  call.finish(outputs);
  return result;
}

namespace detail {

template <class... A>
constexpr bool kFirstIsTensor = false;
template <class First, class... A>
constexpr bool kFirstIsTensor<First, A...> = std::is_same_v<std::remove_cvref_t<First>, at::Tensor>;

// Calls f(arguments...) as one call of the module, between its borders.
template <class R, class... A, class F>
R run_between_borders(const ScopeHolder& holder, const F& f, A... arguments) {
  const auto inside = [&](auto&&... given) -> R {
    return run_in_scope<R>(holder.scope(), [&]() -> R { return f(std::forward<A>(given)...); }, given...);
  };
  const auto entered = [&](auto&& first, auto&&... rest) -> R {
    if (!holder.borders().enter) return inside(first, rest...);
    at::Tensor changed = holder.borders().enter(first);
    return inside(changed, rest...);
  };
  const auto called = [&]() -> R {
    if constexpr (kFirstIsTensor<A...>)
      return entered(arguments...);
    else
      return inside(arguments...);
  };
  if constexpr (std::is_same_v<R, at::Tensor>)
    return holder.borders().leave ? holder.borders().leave(called()) : called();
  else
    return called();
}

}  // namespace detail

template <class D, class Signature>
class Hooked;

template <class D, class R, class... A>
class Hooked<D, R(A...)> : public torch::nn::Cloneable<D>, public ScopeHolder {
 public:
  void reset() override {}

  bool enters_with_tensor() const override { return detail::kFirstIsTensor<A...>; }
  bool leaves_with_tensor() const override { return std::is_same_v<R, at::Tensor>; }

  R forward(A... arguments) {
    const auto call = [this](A... given) -> R {
      return static_cast<D*>(this)->forward_impl(std::forward<A>(given)...);
    };
    return detail::run_between_borders<R, A...>(*this, call, std::forward<A>(arguments)...);
  }
};

namespace detail {

template <class F>
struct SignatureOf;
template <class C, class R, class... A>
struct SignatureOf<R (C::*)(A...)> {
  using Type = R(A...);
};
template <class C, class R, class... A>
struct SignatureOf<R (C::*)(A...) const> {
  using Type = R(A...);
};
template <class M>
struct SignatureOfForward : SignatureOf<decltype(&M::forward)> {};

template <class M, class Signature>
class UnitOfSignature;

template <class M, class R, class... A>
class UnitOfSignature<M, R(A...)> : public M, public ScopeHolder {
 public:
  static_assert(!std::is_base_of_v<ScopeHolder, M>, "a Hooked module is a unit already");
  explicit UnitOfSignature(const M& module) : M(module) {}

  bool enters_with_tensor() const override { return kFirstIsTensor<A...>; }
  bool leaves_with_tensor() const override { return std::is_same_v<R, at::Tensor>; }

  R forward(A... arguments) {
    const auto call = [this](A... given) -> R { return M::forward(std::forward<A>(given)...); };
    return run_between_borders<R, A...>(*this, call, std::forward<A>(arguments)...);
  }
};

}  // namespace detail

// A module of the class M, with the same names and parameters, whose forward() the engine sees. A call of M::forward() past it,
// as module->as<M>()->forward(x) is, gathers nothing.
template <class M, class Signature = typename detail::SignatureOfForward<M>::Type>
using Unit = detail::UnitOfSignature<M, Signature>;
// For members: UnitOf<torch::nn::Linear> up{nullptr}.
template <class Holder>
using UnitOf = torch::nn::ModuleHolder<Unit<typename Holder::ContainedType>>;

// Returns a shallow copy of `module` as a unit: register, call and keep it, in the place of `module`. The class must be copyable,
// and hand out no `this` where it is built. For a class whose forward() is a template or has overloads the signature says which:
// unit_as<at::Tensor(at::Tensor)>(module).
template <class M>
[[nodiscard]] torch::nn::ModuleHolder<Unit<M>> unit(const torch::nn::ModuleHolder<M>& module) {
  TESSERA_CHECK_VALUE(!module.is_empty(), "unit", "the module is null");
  static_cast<void>(module->name());  // the copy keeps the name of the class
  return torch::nn::ModuleHolder<Unit<M>>(std::make_shared<Unit<M>>(*module));
}
template <class M>
[[nodiscard]] torch::nn::ModuleHolder<Unit<M>> unit(const std::shared_ptr<M>& module) {
  return unit(torch::nn::ModuleHolder<M>(module));
}
template <class Signature, class M>
[[nodiscard]] torch::nn::ModuleHolder<Unit<M, Signature>> unit_as(const torch::nn::ModuleHolder<M>& module) {
  TESSERA_CHECK_VALUE(!module.is_empty(), "unit_as", "the module is null");
  static_cast<void>(module->name());
  return torch::nn::ModuleHolder<Unit<M, Signature>>(std::make_shared<Unit<M, Signature>>(*module));
}

}  // namespace tessera::nn

// Tools of custom autograd functions: values of any type in the graph, tensors as matrices.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace tessera::parallel {

template <class T>
struct Held : torch::CustomClassHolder {
  explicit Held(T value) : value(std::move(value)) {}
  T value;
};
template <class T>
void hold(torch::autograd::AutogradContext* ctx, T value) {
  ctx->saved_data["held"] = at::IValue::make_capsule(c10::make_intrusive<Held<T>>(std::move(value)));
}
template <class T>
T& held(torch::autograd::AutogradContext* ctx) {
  return static_cast<Held<T>&>(*ctx->saved_data["held"].toCapsule()).value;
}

// x as [rows, n], from [..., n], also where it has no elements.
inline at::Tensor as_rows(const at::Tensor& x) {
  return x.dim() > 1 ? x.flatten(0, -2) : x.unsqueeze(0);
}

// Whether autograd notes what is done with x.
inline bool records(const at::Tensor& x) {
  return c10::GradMode::is_enabled() && x.requires_grad();
}

}  // namespace tessera::parallel

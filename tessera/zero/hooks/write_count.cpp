#include "tessera/zero/hooks/write_count.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "tessera/base/compat.h"

namespace tessera::zero {

namespace {

// The accumulator that torch has for the tensor, made where there is none.
compat::NodePtr accumulator_of(const at::Tensor& tensor) {
  if (auto node = torch::autograd::impl::try_get_grad_accumulator(tensor)) return node;
  const torch::autograd::AutoGradMode with_grad(true);
  if (tensor.requires_grad()) return torch::autograd::impl::grad_accumulator(tensor);
  auto node = compat::make_node<torch::autograd::AccumulateGrad>(tensor);
  torch::autograd::impl::set_grad_accumulator(tensor, compat::weak(node));
  return node;
}

}  // namespace

void WriteCount::look(const at::Tensor& tensor) {
  version_ = tensor._version();
  if (tensor.is_inference() || !tensor.is_leaf()) return;
  if (accumulator_ != nullptr && !was_set(tensor)) return;
  const auto node = std::make_shared<compat::NodePtr>(accumulator_of(tensor));
  accumulator_ = std::shared_ptr<const void>(node, &**node);
}

bool WriteCount::was_set(const at::Tensor& tensor) const {
  if (accumulator_ == nullptr) return false;
  const auto node = torch::autograd::impl::try_get_grad_accumulator(tensor);
  return (node ? static_cast<const void*>(&*node) : nullptr) != accumulator_.get();
}

}  // namespace tessera::zero

// Hooks: on the gradient accumulators of parameters.

#include "tessera/zero/hooks/nodes.h"

namespace tessera::zero {

bool Hooks::is_watched(const at::Tensor& param) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(param);
  if (!node) return false;
  return std::any_of(node->post_hooks().begin(), node->post_hooks().end(), [](const auto& hook) {
    const auto* ready = dynamic_cast<const ReadyHook*>(hook.get());
    return ready != nullptr && ready->link->hooks != nullptr;
  });
}

void Hooks::watch(const at::Tensor& param, ParamId id, bool stash) {
  // The accumulator of a leaf can only be made while grad mode is on.
  const torch::autograd::AutoGradMode with_grad(true);
  auto node = torch::autograd::impl::grad_accumulator(param);
  TESSERA_CHECK(node, "zero.hooks", "parameter does not require gradients");
  auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(&*node);
  TESSERA_ASSERT(accumulate != nullptr);
  if (stash) accumulate->add_pre_hook(std::make_unique<BeforeHook>(link_, id, accumulate));
  const auto key = accumulate->add_post_hook(std::make_unique<ReadyHook>(link_, id, accumulate));
  if (accumulators_.size() <= static_cast<size_t>(id)) accumulators_.resize(id + 1);
  if (accumulators_[id].node) accumulators_[id].node->del_post_hook(accumulators_[id].post_hook);
  accumulators_[id] = {std::move(node), key};
}

bool Hooks::watches(const at::Tensor& param, ParamId id) const {
  if (static_cast<size_t>(id) >= accumulators_.size() || accumulators_[id].post_hook == 0) return false;
  return torch::autograd::impl::try_get_grad_accumulator(param) == accumulators_[id].node;
}

}  // namespace tessera::zero

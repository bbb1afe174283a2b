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

void Hooks::watch(const at::Tensor& param, int slot, bool stash) {
  // The accumulator of a leaf can only be made while grad mode is on.
  const torch::autograd::AutoGradMode with_grad(true);
  auto node = torch::autograd::impl::grad_accumulator(param);
  TESSERA_CHECK(node, "zero.hooks", "parameter does not require gradients");
  auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(&*node);
  TESSERA_ASSERT(accumulate != nullptr);
  if (stash) accumulate->add_pre_hook(std::make_unique<BeforeHook>(link_, slot, accumulate));
  const auto key = accumulate->add_post_hook(std::make_unique<ReadyHook>(link_, slot, accumulate));
  if (accumulators_.size() <= static_cast<size_t>(slot)) accumulators_.resize(slot + 1);
  if (accumulators_[slot].node) accumulators_[slot].node->del_post_hook(accumulators_[slot].post_hook);
  accumulators_[slot] = {std::move(node), key};
}

bool Hooks::watches(const at::Tensor& param, int slot) const {
  if (static_cast<size_t>(slot) >= accumulators_.size() || accumulators_[slot].post_hook == 0) return false;
  return torch::autograd::impl::try_get_grad_accumulator(param) == accumulators_[slot].node;
}

}  // namespace tessera::zero

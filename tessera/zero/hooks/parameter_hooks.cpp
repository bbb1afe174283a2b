// Hooks: on parameters and their gradient accumulators.

#include "tessera/zero/hooks/nodes.h"

namespace tessera::zero {

namespace {

using PreHooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

// The hooks on the tensor; none where autograd does not know it.
const PreHooks* hooks_on(const at::Tensor& param) {
  return torch::autograd::impl::get_autograd_meta(param) == nullptr ? nullptr : &torch::autograd::impl::hooks(param);
}

}  // namespace

bool Hooks::is_watched(const at::Tensor& param) {
  const PreHooks* hooks = hooks_on(param);
  return hooks != nullptr && std::any_of(hooks->begin(), hooks->end(), [](const auto& hook) {
           const auto* ours = dynamic_cast<const ParamHook*>(hook.get());
           return ours != nullptr && ours->shared->hooks != nullptr;
         });
}

bool Hooks::watches(const at::Tensor& param) const {
  const PreHooks* hooks = hooks_on(param);
  return hooks != nullptr &&
         std::any_of(hooks->begin(), hooks->end(), [&](const auto& hook) { return is_of(hook, shared_); });
}

void Hooks::watch(const at::Tensor& param, ParamId id) {
  // The accumulator of a leaf can only be made while grad mode is on.
  const torch::autograd::AutoGradMode with_grad(true);
  auto node = torch::autograd::impl::grad_accumulator(param);
  TESSERA_CHECK(node, "zero.hooks", "parameter does not require gradients");
  {
    const auto held = without_readers();
    torch::autograd::impl::hooks(param).push_back(std::make_unique<ParamHook>(shared_, id));
  }
  if (accumulators_.size() <= static_cast<size_t>(id)) accumulators_.resize(id + 1);
  follow(std::move(node), id);
}

// `node` accumulates the gradient of parameter `id`, or gives it to torch.autograd.grad.
void Hooks::follow(compat::NodePtr node, ParamId id) {
  auto* accumulate = node ? dynamic_cast<torch::autograd::AccumulateGrad*>(&*node) : nullptr;
  if (accumulate == nullptr) return;
  const auto& hooks = accumulate->post_hooks();
  const auto ready = [&](const auto& hook) {
    const auto* ours = dynamic_cast<const ReadyHook*>(hook.get());
    return ours != nullptr && ours->shared == shared_;
  };
  if (std::any_of(hooks.begin(), hooks.end(), ready)) return;
  accumulate->add_pre_hook(std::make_unique<BeforeHook>(shared_, id, accumulate));
  accumulate->add_post_hook(std::make_unique<ReadyHook>(shared_, id, accumulate));
  accumulators_[id] = std::move(node);
}

}  // namespace tessera::zero

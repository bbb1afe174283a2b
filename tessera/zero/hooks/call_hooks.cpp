// Hooks: on the nodes that made outputs of the engine, and outputs and inputs of module calls.

#include "tessera/zero/hooks/nodes.h"

namespace tessera::zero {

compat::NodePtr Hooks::maker_of(const at::Tensor& t) {
  if (!t.defined() || is_functorch_wrapper(t) || !t.requires_grad()) return {};
  try {
    return t.grad_fn();
  } catch (const std::exception&) {
    return {};
  }
}

void Hooks::watch_outputs(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& t : outputs) {
    const compat::NodePtr node = maker_of(t);
    // Our hook is the first of its node's: a refused backward must not have gathered anything.
    if (node) node->pre_hooks().insert(node->pre_hooks().begin(), std::make_unique<OutputHook>(shared_));
  }
}

std::vector<compat::NodePtr> Hooks::producers_of(const std::vector<at::Tensor>& inputs) {
  std::vector<compat::NodePtr> nodes;
  if (!c10::GradMode::is_enabled()) return nodes;
  for (const at::Tensor& t : inputs) {
    if (!t.defined() || is_functorch_wrapper(t) || !t.requires_grad()) continue;
    compat::NodePtr node = t.is_leaf() ? torch::autograd::impl::gradient_edge(t).function : maker_of(t);
    if (!node || find_hook<ParamHook>(node->tensor_pre_hooks()) != nullptr) continue;
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(std::move(node));
  }
  return nodes;
}

bool Hooks::watch_call(std::shared_ptr<ScopeCall> call, const std::vector<at::Tensor>& outputs,
                       const std::vector<compat::NodePtr>& producers) {
  std::vector<torch::autograd::Node*> ends;
  for (const at::Tensor& t : outputs) {
    const compat::NodePtr node = maker_of(t);
    if (node && std::find(ends.begin(), ends.end(), &*node) == ends.end()) ends.push_back(&*node);
  }
  if (ends.empty()) return false;
  watches_calls_ = true;
  ScopeCall& scope_call = *call;
  const auto watched = std::make_shared<WatchedCall>(shared_, std::move(call));
  for (torch::autograd::Node* node : ends)
    node->add_pre_hook(std::make_unique<CallHook>(watched, CallEvent::Open));
  scope_call.producers = 0;
  for (const compat::NodePtr& node : producers) {
    if (std::find(ends.begin(), ends.end(), &*node) != ends.end()) continue;  // handed through
    const bool leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&*node) != nullptr;
    // The closing comes before the node opens another call, which takes its buckets.
    auto& hooks = node->pre_hooks();
    const auto opens = [](const auto& hook) {
      const auto* found = dynamic_cast<const CallHook*>(hook.get());
      return found != nullptr && found->event == CallEvent::Open;
    };
    hooks.insert(std::find_if(hooks.begin(), hooks.end(), opens),
                 std::make_unique<CallHook>(watched, leaf ? CallEvent::CloseLater : CallEvent::Close));
    ++scope_call.producers;
  }
  return true;
}

// The watched calls in the graph that the running task goes through. A call may be there several times.
std::vector<ScopeCall*> Hooks::calls_to_run() const {
  std::vector<ScopeCall*> calls;
  if (!watches_calls_) return calls;
  task_runs([&](torch::autograd::Node& node) {
    for (const auto& hook : node.pre_hooks()) {
      const auto* found = dynamic_cast<const CallHook*>(hook.get());
      if (found != nullptr && found->event == CallEvent::Open && found->watched->shared == shared_)
        calls.push_back(found->watched->call.get());
    }
    return false;  // on to the next one
  });
  return calls;
}

}  // namespace tessera::zero

#include "tessera/zero/hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::zero {

using torch::autograd::variable_list;

// Lives in the callback of a graph task: dies with it, also when the task threw.
struct Hooks::Token {
  Token(std::shared_ptr<Link> l, int i) : link(std::move(l)), id(i) {}
  ~Token() {
    const std::lock_guard lock(link->mutex);
    if (link->hooks != nullptr) link->hooks->task_gone(id);
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  std::shared_ptr<Link> link;
  int id;
};

namespace {
enum class CallEvent : uint8_t { Open, Close, CloseLater };
}  // namespace

// The hook objects that autograd owns reach the private parts of Hooks through here.
struct HookAccess {
  using LinkPtr = std::shared_ptr<Hooks::Link>;

  static void before(const LinkPtr& link, int slot, const at::Tensor& param) {
    const std::lock_guard lock(link->mutex);
    if (link->hooks == nullptr) return;
    link->hooks->touch_task(true);
    const torch::autograd::AutoGradMode no_grad(false);
    link->hooks->sink_.before_accumulate(slot, param.mutable_grad());
  }

  static void ready(const LinkPtr& link, int slot, const at::Tensor& param) {
    const std::lock_guard lock(link->mutex);
    if (link->hooks == nullptr) return;
    link->hooks->touch_task(true);
    const torch::autograd::AutoGradMode no_grad(false);
    link->hooks->sink_.gradient_ready(slot, param.mutable_grad());
  }

  static void output(const LinkPtr& link) {
    const std::lock_guard lock(link->mutex);
    if (link->hooks != nullptr) link->hooks->touch_task(false);
  }

  static void call(const LinkPtr& link, const std::shared_ptr<ScopeCall>& scope_call, CallEvent event) {
    const std::lock_guard lock(link->mutex);
    if (link->hooks == nullptr) return;
    link->hooks->touch_task(false);
    const torch::autograd::AutoGradMode no_grad(false);
    switch (event) {
      case CallEvent::Open:
        return link->hooks->sink_.call_opened(*scope_call);
      case CallEvent::Close:
        return link->hooks->sink_.call_closed(*scope_call);
      case CallEvent::CloseLater:
        link->hooks->deferred_.push_back({torch::autograd::get_current_graph_task_id(), scope_call});
    }
  }

  static void gone(const LinkPtr& link, ScopeCall& scope_call) {
    const std::lock_guard lock(link->mutex);
    if (link->hooks != nullptr) link->hooks->sink_.call_gone(scope_call);
  }
};

namespace {

using LinkPtr = HookAccess::LinkPtr;

// Compiled autograd traces hooks it knows; ours are opaque to it.
[[noreturn]] void refuse_compiled_autograd() {
  TESSERA_CHECK_BUILT(false, "zero.hooks", "compiled autograd is not supported; compile the module, not its backward");
}

struct BeforeHook final : torch::autograd::FunctionPreHook {
  BeforeHook(LinkPtr l, int s, torch::autograd::AccumulateGrad* n) : link(std::move(l)), slot(s), node(n) {}
  variable_list operator()(const variable_list& grads) override {
    HookAccess::before(link, slot, node->variable);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  LinkPtr link;
  int slot;
  torch::autograd::AccumulateGrad* node;  // owns this hook
};

struct ReadyHook final : torch::autograd::FunctionPostHook {
  ReadyHook(LinkPtr l, int s, torch::autograd::AccumulateGrad* n) : link(std::move(l)), slot(s), node(n) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    HookAccess::ready(link, slot, node->variable);
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  LinkPtr link;
  int slot;
  torch::autograd::AccumulateGrad* node;  // owns this hook
};

struct OutputHook final : torch::autograd::FunctionPreHook {
  explicit OutputHook(LinkPtr l) : link(std::move(l)) {}
  variable_list operator()(const variable_list& grads) override {
    HookAccess::output(link);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  LinkPtr link;
};

// Owned by all hooks of a call together.
struct WatchedCall {
  WatchedCall(LinkPtr l, std::shared_ptr<ScopeCall> c) : link(std::move(l)), call(std::move(c)) {}
  ~WatchedCall() { HookAccess::gone(link, *call); }
  WatchedCall(const WatchedCall&) = delete;
  WatchedCall& operator=(const WatchedCall&) = delete;
  LinkPtr link;
  std::shared_ptr<ScopeCall> call;
};

struct CallHook final : torch::autograd::FunctionPreHook {
  CallHook(std::shared_ptr<WatchedCall> w, CallEvent e) : watched(std::move(w)), event(e) {}
  variable_list operator()(const variable_list& grads) override {
    HookAccess::call(watched->link, watched->call, event);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  std::shared_ptr<WatchedCall> watched;
  CallEvent event;
};

bool is_functorch_wrapper(const at::Tensor& t) {
  const auto keys = t.unsafeGetTensorImpl()->key_set();
  return keys.has(c10::DispatchKey::FuncTorchBatched) || keys.has(c10::DispatchKey::FuncTorchGradWrapper);
}

}  // namespace

Hooks::Hooks(HookSink& sink) : sink_(sink), link_(std::make_shared<Link>()) {
  link_->hooks = this;
}

Hooks::~Hooks() {
  remove();
}

void Hooks::watch(const at::Tensor& param, int slot, bool stash) {
  // The accumulator of a leaf can only be made while grad mode is on.
  const torch::autograd::AutoGradMode with_grad(true);
  auto node = torch::autograd::impl::grad_accumulator(param);
  TESSERA_CHECK(node, "zero.hooks", "parameter does not require gradients");
  for (const auto& hook : node->post_hooks()) {
    const auto* other = dynamic_cast<const ReadyHook*>(hook.get());
    TESSERA_CHECK_VALUE(other == nullptr || other->link->hooks == nullptr, "zero.hooks",
                        "a parameter already belongs to a live engine; call destroy() on that engine first");
  }
  auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(&*node);
  TESSERA_ASSERT(accumulate != nullptr);
  if (stash) accumulate->add_pre_hook(std::make_unique<BeforeHook>(link_, slot, accumulate));
  const auto key = accumulate->add_post_hook(std::make_unique<ReadyHook>(link_, slot, accumulate));
  if (accumulators_.size() <= static_cast<size_t>(slot)) accumulators_.resize(slot + 1);
  accumulators_[slot] = {std::move(node), key};
}

void Hooks::watch_outputs(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& t : outputs) {
    if (!t.defined() || is_functorch_wrapper(t) || !t.requires_grad()) continue;
    const auto& node = t.grad_fn();
    if (node) node->add_pre_hook(std::make_unique<OutputHook>(link_));
  }
}

std::vector<compat::NodePtr> Hooks::producers_of(const std::vector<at::Tensor>& inputs) {
  std::vector<compat::NodePtr> nodes;
  if (!c10::GradMode::is_enabled()) return nodes;
  for (const at::Tensor& t : inputs) {
    if (!t.defined() || is_functorch_wrapper(t) || !t.requires_grad()) continue;
    compat::NodePtr node = torch::autograd::impl::gradient_edge(t).function;
    const auto trained = [](const auto& hook) { return dynamic_cast<const ReadyHook*>(hook.get()) != nullptr; };
    if (!node || std::any_of(node->post_hooks().begin(), node->post_hooks().end(), trained)) continue;
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(std::move(node));
  }
  return nodes;
}

bool Hooks::watch_call(std::shared_ptr<ScopeCall> call, const std::vector<at::Tensor>& outputs,
                       const std::vector<compat::NodePtr>& producers) {
  std::vector<torch::autograd::Node*> ends;
  for (const at::Tensor& t : outputs) {
    if (!t.defined() || is_functorch_wrapper(t) || !t.requires_grad()) continue;
    const auto& node = t.grad_fn();
    if (node && std::find(ends.begin(), ends.end(), &*node) == ends.end()) ends.push_back(&*node);
  }
  if (ends.empty()) return false;
  ScopeCall& scope_call = *call;
  const auto watched = std::make_shared<WatchedCall>(link_, std::move(call));
  for (torch::autograd::Node* node : ends)
    node->add_pre_hook(std::make_unique<CallHook>(watched, CallEvent::Open));
  scope_call.producers = 0;
  for (const compat::NodePtr& node : producers) {
    if (std::find(ends.begin(), ends.end(), &*node) != ends.end()) continue;  // handed through
    const bool leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&*node) != nullptr;
    node->add_pre_hook(std::make_unique<CallHook>(watched, leaf ? CallEvent::CloseLater : CallEvent::Close));
    ++scope_call.producers;
  }
  return true;
}

bool Hooks::inside_task() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

void Hooks::enter_forward() {
  const std::lock_guard lock(link_->mutex);
  prune_dead_tasks();
  ++forward_depth_;
}

void Hooks::leave_forward() {
  const std::lock_guard lock(link_->mutex);
  --forward_depth_;
}

bool Hooks::in_backward() {
  const std::lock_guard lock(link_->mutex);
  prune_dead_tasks();
  return !tasks_.empty();
}

void Hooks::prune_dead_tasks() {
  std::erase_if(tasks_, [](const auto& entry) { return entry.second.token.expired(); });
}

void Hooks::touch_task(bool from_parameter) {
  const int id = torch::autograd::get_current_graph_task_id();
  const auto known = tasks_.find(id);
  if (known == tasks_.end()) {
    prune_dead_tasks();
    const bool outermost = tasks_.empty();
    auto token = std::make_shared<Token>(link_, id);
    const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
    tasks_[id] = {token, exec_info != nullptr && exec_info->empty()};
    torch::autograd::Engine::get_default_engine().queue_callback([link = link_, id, token] {
      const std::lock_guard lock(link->mutex);
      if (link->hooks != nullptr) link->hooks->end_task(id);
    });
    if (outermost) {
      in_forward_task_ = forward_depth_ > 0;
      saw_nested_ = false;
      counts_ = false;
      if (!in_forward_task_) sink_.backward_begun();
    } else {
      saw_nested_ = true;
    }
  }
  if (from_parameter || tasks_[id].plain) counts_ = true;
}

void Hooks::end_task(int id) {
  for (size_t i = 0; i < deferred_.size(); ++i) {
    if (deferred_[i].task == id) sink_.call_closed(*deferred_[i].call);
  }
  std::erase_if(deferred_, [&](const Deferred& d) { return d.task == id; });
  tasks_.erase(id);
  prune_dead_tasks();
  if (!tasks_.empty()) return;
  if (counts_ && !in_forward_task_) sink_.backward_done();
  sink_.tasks_ended();
}

void Hooks::task_gone(int id) {
  std::erase_if(deferred_, [&](const Deferred& d) { return d.task == id; });
  if (tasks_.erase(id) == 0) return;  // it ended well
  prune_dead_tasks();
  if (tasks_.empty()) sink_.tasks_ended();
}

void Hooks::remove() {
  const std::lock_guard lock(link_->mutex);
  link_->hooks = nullptr;
  for (const Accumulator& a : accumulators_) {
    if (a.node) a.node->del_post_hook(a.post_hook);
  }
  accumulators_.clear();
  tasks_.clear();
}

}  // namespace tessera::zero

#include "tessera/zero/hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tessera/base/error.h"

namespace tessera::zero {

using torch::autograd::variable_list;

// Lives in the callback of a graph task: dies with it.
struct Hooks::Token {};

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
    auto token = std::make_shared<Token>();
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
  tasks_.erase(id);
  prune_dead_tasks();
  if (tasks_.empty() && counts_ && !in_forward_task_) sink_.backward_done();
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

// What autograd owns of an engine's hooks: the objects on nodes and accumulators, and how they reach Hooks.
#pragma once

#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/zero/hooks.h"

namespace tessera::zero {

using torch::autograd::variable_list;

// Lives in the callback of a graph task and dies with it, also when the task threw.
struct Hooks::Token {
  Token(std::shared_ptr<Shared> l, int i) : shared(std::move(l)), id(i) {}
  ~Token() {
    shared->run_or_keep([](Hooks& hooks) { hooks.end_gone_tasks(); });
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  std::shared_ptr<Shared> shared;
  int id;
};

enum class CallEvent : uint8_t { Open, Close, CloseLater };

// What one scale() left in a graph.
struct ScaleMark {
  std::weak_ptr<Hooks::Shared> owner;
  double value;                                        // factor of the gradients behind the mark
  std::vector<std::weak_ptr<Hooks::Shared>> ends;      // engines with parameters behind the mark, the owner among them
  std::vector<std::weak_ptr<ScaleMark>> around;        // marks of later calls of scale() over the same tensor
  std::unordered_set<torch::autograd::Node*> outputs;  // of engines, behind the mark
  int task = -1;                                       // the task that ran the mark last
  bool spent = false;                                  // a backward used the mark

  void run(const std::shared_ptr<ScaleMark>& self);
};

// The hook objects that autograd owns reach the private parts of Hooks through here.
struct HookAccess {
  using SharedPtr = std::shared_ptr<Hooks::Shared>;

  static void before(const SharedPtr& shared, ParamId id, const at::Tensor& param) {
    const std::lock_guard lock(shared->mutex);
    if (shared->hooks == nullptr) return;
    refuse_graph();
    shared->hooks->touch_task(true);
    const torch::autograd::AutoGradMode no_grad(false);
    if (shared->hooks->refuses_parameter()) refuse_unscaled();
    shared->hooks->sink_.before_accumulate(id, param.mutable_grad());
  }

  // Whether no one but the node's input, which is about to go, knows the memory of p.grad. (Where somebody else has that tensor,
  // AccumulateGrad has copied it.) torch's graphs write to memory that others have: they watch it by a weak reference, or
  // make tensors of it that do not own it, as from_blob() does.
  static bool is_alone(const at::Tensor& grad, const variable_list& inputs) {
    if (!grad.defined() || grad.layout() != at::kStrided || !grad.has_storage() || grad.use_count() != 1) return false;
    const c10::Storage& storage = grad.storage();
    const auto deleter = c10::GetAllocator(grad.device().type())->raw_deleter();  // null: the allocator does not say
    if (deleter != nullptr && storage.data_ptr().get_deleter() != deleter) return false;
    constexpr size_t kOurs = 2;  // all owners together count as one, and the reference that asks
    if (storage.getWeakStorageImpl().weak_use_count() != kOurs) return false;
    size_t known = 1;
    for (const at::Tensor& input : inputs) {
      if (!input.defined() || !input.has_storage() || !input.storage().is_alias_of(storage)) continue;
      ++known;
      // The gradient of a linear layer's weight is a transpose, whose base nobody else knows.
      if (input.is_view() && input._base().use_count() == 1) ++known;
    }
    return storage.use_count() == known && storage.nbytes() == grad.nbytes();
  }

  static void ready(const SharedPtr& shared, ParamId id, const at::Tensor& param, const variable_list& inputs) {
    const std::lock_guard lock(shared->mutex);
    if (shared->hooks == nullptr) return;
    if (torch::autograd::GradMode::is_enabled()) param.mutable_grad().reset();
    refuse_graph();
    shared->hooks->touch_task(true);
    const torch::autograd::AutoGradMode no_grad(false);
    if (shared->hooks->refuses_parameter()) {
      param.mutable_grad().reset();
      refuse_unscaled();
    }
    const bool alone = is_alone(param.grad(), inputs);
    shared->hooks->sink_.gradient_ready(id, param.mutable_grad(), shared->hooks->info(), alone);
  }

  static void follow(const SharedPtr& shared, ParamId id) {
    const std::lock_guard lock(shared->mutex);
    if (shared->hooks != nullptr) shared->hooks->follow(torch::autograd::get_current_node(), id);
  }

  static void output(const SharedPtr& shared) {
    const std::lock_guard lock(shared->mutex);
    if (shared->hooks == nullptr) return;
    shared->hooks->touch_task(false);
    shared->hooks->check_output();
  }

  static void outer_task(const SharedPtr& shared) {
    const std::lock_guard lock(shared->mutex);
    if (shared->hooks != nullptr) shared->hooks->touch_outer_task();
  }

  // Grad mode is on in a hook only when the backward is recorded itself.
  static void refuse_graph() {
    TESSERA_CHECK(
        !torch::autograd::GradMode::is_enabled(), "engine",
        "a backward with create_graph: an engine moves gradients into its own buffers, which leaves no graph to "
        "differentiate again. Use autograd's grad() of the loss by parameters or inputs, with create_graph, and call "
        "backward() on what you make of it; nothing of this backward was kept");
  }

  [[noreturn]] static void refuse_unscaled() {
    TESSERA_CHECK(
        false, "engine",
        "Loss scaling is required: this backward reaches parameters of an engine with a loss scale through its "
        "outputs, unscaled. Call engine.scale(loss).backward() (or engine.scale(output).backward(gradient)), "
        "once for every backward, or engine.backward(loss); nothing of this backward was kept");
  }

  static void call(const SharedPtr& shared, const std::shared_ptr<ScopeCall>& scope_call, CallEvent event) {
    const std::lock_guard lock(shared->mutex);
    if (shared->hooks == nullptr) return;
    shared->hooks->touch_task(false);
    const bool again = torch::autograd::GradMode::is_enabled();  // torch enables it for create_graph
    const torch::autograd::AutoGradMode no_grad(false);
    switch (event) {
      case CallEvent::Open:
        return shared->hooks->sink_.call_opened(*scope_call, again);
      case CallEvent::Close:
        return shared->hooks->sink_.call_closed(*scope_call, shared->hooks->info());
      case CallEvent::CloseLater:
        shared->hooks->deferred_.push_back({torch::autograd::get_current_graph_task_id(), scope_call});
    }
  }

  static void gone(const SharedPtr& shared, const std::shared_ptr<ScopeCall>& scope_call) {
    shared->run_or_keep([scope_call](Hooks& hooks) { hooks.sink_.call_gone(*scope_call); });
  }
};

using SharedPtr = HookAccess::SharedPtr;

// Compiled autograd traces hooks that it knows; ours are opaque to it.
[[noreturn]] inline void refuse_compiled_autograd() {
  TESSERA_CHECK_BUILT(false, "zero.hooks", "compiled autograd is not supported; compile the module, not its backward");
}

struct BeforeHook final : torch::autograd::FunctionPreHook {
  BeforeHook(SharedPtr l, ParamId i, torch::autograd::AccumulateGrad* n) : shared(std::move(l)), id(i), node(n) {}
  variable_list operator()(const variable_list& grads) override {
    HookAccess::before(shared, id, node->variable);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  SharedPtr shared;
  ParamId id;
  torch::autograd::AccumulateGrad* node;  // owns this hook
};

struct ReadyHook final : torch::autograd::FunctionPostHook {
  ReadyHook(SharedPtr l, ParamId i, torch::autograd::AccumulateGrad* n) : shared(std::move(l)), id(i), node(n) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    HookAccess::ready(shared, id, node->variable, inputs);
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  SharedPtr shared;
  ParamId id;
  torch::autograd::AccumulateGrad* node;  // owns this hook
};

// The hook on the parameter: Note [Accumulators change].
struct ParamHook final : torch::autograd::FunctionPreHook {
  ParamHook(SharedPtr l, ParamId i) : shared(std::move(l)), id(i) {}
  variable_list operator()(const variable_list& grads) override {
    HookAccess::follow(shared, id);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  SharedPtr shared;
  ParamId id;
};

// Tells the engine that a node is about to run.
template <void (*report)(const SharedPtr&)>
struct NodeHook final : torch::autograd::FunctionPreHook {
  explicit NodeHook(SharedPtr l) : shared(std::move(l)) {}
  variable_list operator()(const variable_list& grads) override {
    report(shared);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  SharedPtr shared;
};

using OutputHook = NodeHook<&HookAccess::output>;
using OuterTaskHook = NodeHook<&HookAccess::outer_task>;

// What all hooks of a call own together.
struct WatchedCall {
  WatchedCall(SharedPtr l, std::shared_ptr<ScopeCall> c) : shared(std::move(l)), call(std::move(c)) {}
  ~WatchedCall() { HookAccess::gone(shared, call); }
  WatchedCall(const WatchedCall&) = delete;
  WatchedCall& operator=(const WatchedCall&) = delete;
  SharedPtr shared;
  std::shared_ptr<ScopeCall> call;
};

struct CallHook final : torch::autograd::FunctionPreHook {
  CallHook(std::shared_ptr<WatchedCall> w, CallEvent e) : watched(std::move(w)), event(e) {}
  variable_list operator()(const variable_list& grads) override {
    HookAccess::call(watched->shared, watched->call, event);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  std::shared_ptr<WatchedCall> watched;
  CallEvent event;
};

struct ScaleHook final : torch::autograd::FunctionPreHook {
  explicit ScaleHook(std::shared_ptr<ScaleMark> m) : mark(std::move(m)) {}
  variable_list operator()(const variable_list& grads) override {
    mark->run(mark);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  std::shared_ptr<ScaleMark> mark;
};

template <class H, class List>
const H* find_hook(const List& hooks) {
  for (const auto& hook : hooks) {
    if (const auto* found = dynamic_cast<const H*>(hook.get())) return found;
  }
  return nullptr;
}

template <class Hook>
bool is_of(const Hook& hook, const SharedPtr& shared) {
  const auto* ours = dynamic_cast<const ParamHook*>(hook.get());
  return ours != nullptr && ours->shared == shared;
}

// Does the running graph task run a node that `wanted` is true for?
template <class F>
bool task_runs(F wanted) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto runs = [&](torch::autograd::Node* node) {
    if (chosen == nullptr || chosen->empty()) return true;
    const auto entry = chosen->find(node);
    return entry != chosen->end() && entry->second.should_execute();
  };
  return nodes != nullptr && std::any_of(nodes->begin(), nodes->end(),
                                         [&](torch::autograd::Node* node) { return runs(node) && wanted(*node); });
}

// The graph task of which the calling thread runs a node or a callback. torch hands out its members one by one only, and not
// the one that says whether the task failed.
inline const torch::autograd::GraphTask& current_graph_task() {
  using torch::autograd::GraphTask;
  const auto* member = reinterpret_cast<const char*>(torch::autograd::get_current_graph_task_nodes_in_graph());
  TESSERA_ASSERT(member != nullptr);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // it has no virtual base
  const auto* task = reinterpret_cast<const GraphTask*>(member - offsetof(GraphTask, nodes_in_graph_));
#pragma GCC diagnostic pop
  TESSERA_ASSERT(static_cast<int>(task->id_) == torch::autograd::get_current_graph_task_id());
  return *task;
}

inline bool is_functorch_wrapper(const at::Tensor& t) {
  const auto keys = t.unsafeGetTensorImpl()->key_set();
  return keys.has(c10::DispatchKey::FuncTorchBatched) || keys.has(c10::DispatchKey::FuncTorchGradWrapper);
}

}  // namespace tessera::zero

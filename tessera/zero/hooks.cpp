#include "tessera/zero/hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <ATen/ops/mul.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>

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

// What one scale() left in a graph.
struct ScaleMark {
  std::weak_ptr<Hooks::Link> owner;
  double value;                                        // gradients behind it are multiplied by this
  std::vector<std::weak_ptr<Hooks::Link>> ends;        // engines with parameters behind it, the owner among them
  std::vector<std::weak_ptr<ScaleMark>> around;        // marks of later calls of scale() over the same tensor
  std::unordered_set<torch::autograd::Node*> outputs;  // of engines, behind it
  int task = -1;                                       // that ran it last
  bool spent = false;                                  // a backward used it

  void run(const std::shared_ptr<ScaleMark>& self);
};

// The hook objects that autograd owns reach the private parts of Hooks through here.
struct HookAccess {
  using LinkPtr = std::shared_ptr<Hooks::Link>;

  static void before(const LinkPtr& link, int slot, const at::Tensor& param) {
    const std::lock_guard lock(link->mutex);
    if (link->hooks == nullptr) return;
    link->hooks->touch_task(true);
    const torch::autograd::AutoGradMode no_grad(false);
    if (link->hooks->refuses_parameter()) refuse_unscaled();
    link->hooks->sink_.before_accumulate(slot, param.mutable_grad());
  }

  static void ready(const LinkPtr& link, int slot, const at::Tensor& param) {
    const std::lock_guard lock(link->mutex);
    if (link->hooks == nullptr) return;
    link->hooks->touch_task(true);
    const torch::autograd::AutoGradMode no_grad(false);
    if (link->hooks->refuses_parameter()) {
      param.mutable_grad().reset();
      refuse_unscaled();
    }
    link->hooks->sink_.gradient_ready(slot, param.mutable_grad());
  }

  static void output(const LinkPtr& link) {
    const std::lock_guard lock(link->mutex);
    if (link->hooks == nullptr) return;
    link->hooks->touch_task(false);
    link->hooks->check_output();
  }

  [[noreturn]] static void refuse_unscaled() {
    TESSERA_CHECK(
        false, "engine",
        "Loss scaling is required: this backward reaches parameters of an engine with a loss scale through its "
        "outputs, unscaled. Call engine.scale(loss).backward() (or engine.scale(output).backward(gradient)), "
        "once for every backward, or engine.backward(loss); nothing of this backward was kept");
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

void Hooks::watch_outputs(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& t : outputs) {
    if (!t.defined() || is_functorch_wrapper(t) || !t.requires_grad()) continue;
    const auto& node = t.grad_fn();
    // First of its node's: a refused backward must not have gathered anything.
    if (node) node->pre_hooks().insert(node->pre_hooks().begin(), std::make_unique<OutputHook>(link_));
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
  watches_calls_ = true;
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
  if (!tasks_.contains(id)) {
    prune_dead_tasks();
    const bool outermost = tasks_.empty();
    auto token = std::make_shared<Token>(link_, id);
    const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
    tasks_[id] = {token, exec_info != nullptr && exec_info->empty()};
    queue_end(token, -1);
    if (outermost) {
      in_forward_task_ = forward_depth_ > 0;
      counts_ = false;
      task_scale_.reset();
      marks_.clear();
      allowed_ = passed_outputs_ = false;
      searched_task_ = -1;
      if (!in_forward_task_) sink_.backward_begun(calls_to_run());
    }
  }
  if (from_parameter || tasks_[id].plain) counts_ = true;
}

// The watched calls in the graph that the running task goes through. One may be there several times.
std::vector<ScopeCall*> Hooks::calls_to_run() const {
  std::vector<ScopeCall*> calls;
  if (!watches_calls_) return calls;
  task_runs([&](torch::autograd::Node& node) {
    for (const auto& hook : node.pre_hooks()) {
      const auto* found = dynamic_cast<const CallHook*>(hook.get());
      if (found != nullptr && found->event == CallEvent::Open && found->watched->link == link_)
        calls.push_back(found->watched->call.get());
    }
    return false;  // on to the next one
  });
  return calls;
}

// Behind what other engines have queued. Round -1: the task is over.
void Hooks::queue_end(const std::shared_ptr<Token>& token, int round) {
  torch::autograd::Engine::get_default_engine().queue_callback([link = link_, token, round] {
    const std::lock_guard lock(link->mutex);
    Hooks* hooks = link->hooks;
    if (hooks == nullptr) return;
    if (round < 0 ? hooks->end_task(token->id) : hooks->end_round(token->id, round)) hooks->queue_end(token, round + 1);
  });
}

// True when it was the last one: then rounds are to follow, and until they are done it counts as running.
bool Hooks::end_task(int id) {
  const auto of_task = [&](const Deferred& d) { return d.task == id; };
  std::vector<Deferred> due;
  std::copy_if(deferred_.begin(), deferred_.end(), std::back_inserter(due), of_task);
  std::erase_if(deferred_, of_task);
  for (const Deferred& deferred : due)
    sink_.call_closed(*deferred.call);
  prune_dead_tasks();
  if (tasks_.size() > 1) {
    tasks_.erase(id);
    return false;
  }
  if (counts_) {
    for (const auto& mark : marks_)
      mark->spent = true;
  }
  return true;
}

bool Hooks::end_round(int id, int round) {
  if (counts_ && !in_forward_task_ && sink_.end_backward(round)) return true;
  tasks_.erase(id);
  prune_dead_tasks();
  if (tasks_.empty()) sink_.tasks_ended();
  return false;
}

void Hooks::task_gone(int id) {
  std::erase_if(deferred_, [&](const Deferred& d) { return d.task == id; });
  if (tasks_.erase(id) == 0) return;  // it ended well
  prune_dead_tasks();
  if (tasks_.empty()) sink_.tasks_ended();
}

// ---------------------------------------------------------------- loss scaling

void ScaleMark::run(const std::shared_ptr<ScaleMark>& self) {
  TESSERA_CHECK(!spent, "engine.scale",
                "one scale() allows one backward, and this one was used. Loss scaling is required again: call "
                "engine.scale(loss) for every backward");
  task = torch::autograd::get_current_graph_task_id();
  // A mark around this one, run before it, has told everyone the value of both.
  const bool told = std::any_of(around.begin(), around.end(), [&](const auto& other) {
    const auto mark = other.lock();
    return mark && mark->task == task;
  });
  const auto asked = owner.lock();
  for (const auto& end : ends) {
    const auto link = end.lock();
    if (!link) continue;
    const std::lock_guard lock(link->mutex);
    if (link->hooks == nullptr) continue;
    link->hooks->touch_task(false);
    if (!told) link->hooks->note_scale(value);
    if (link == asked) {
      link->hooks->marks_.push_back(self);
      if (!link->hooks->allowed_) link->hooks->check_all_scaled();
      link->hooks->allowed_ = true;
    }
  }
}

void Hooks::note_scale(double value) {
  TESSERA_CHECK(task_scale_.value_or(value) == value, "engine.scale",
                "one backward reaches an engine with two scales, ", *task_scale_, " and ", value,
                ": scale the sum of the losses, or call backward() on each; several engines scale one loss as "
                "a.scale(b.scale(loss))");
  task_scale_ = value;
}

namespace {

bool is_output_of(torch::autograd::Node& node, const LinkPtr& link) {
  const auto& hooks = node.pre_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) {
    const auto* output = dynamic_cast<const OutputHook*>(hook.get());
    return output != nullptr && output->link == link;
  });
}

// The part of a graph behind some nodes.
struct Behind {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<std::shared_ptr<ScaleMark>> marks;
  std::vector<LinkPtr> ends;  // engines whose parameters are there

  // Does not go beyond marks unless `through`. Nodes of earlier calls are not visited again.
  void visit(const std::vector<torch::autograd::Node*>& from, bool through) {
    std::vector<torch::autograd::Node*> stack = from;
    while (!stack.empty()) {
      torch::autograd::Node* node = stack.back();
      stack.pop_back();
      if (const auto* hook = find_hook<ScaleHook>(node->pre_hooks())) {
        if (std::find(marks.begin(), marks.end(), hook->mark) == marks.end()) {
          marks.push_back(hook->mark);
          if (!through) held.push_back(node);
        }
        if (!through) continue;
      }
      if (find_hook<OutputHook>(node->pre_hooks()) != nullptr) outputs.push_back(node);
      if (const auto* end = find_hook<ReadyHook>(node->post_hooks())) {
        if (std::find(ends.begin(), ends.end(), end->link) == ends.end()) ends.push_back(end->link);
      }
      for (const auto& edge : node->next_edges()) {
        if (edge.function && seen.insert(&*edge.function).second) stack.push_back(&*edge.function);
      }
    }
  }
  std::vector<torch::autograd::Node*> outputs;  // of engines
  std::vector<torch::autograd::Node*> held;     // marked nodes that were not gone beyond
};

}  // namespace

at::Tensor Hooks::scale(const at::Tensor& x, double scale) {
  Behind behind;
  behind.visit({&*x.grad_fn()}, /*through=*/false);
  double value = scale, carried = 1;
  if (!behind.marks.empty()) {
    carried = behind.marks.front()->value;
    const bool alike = behind.ends.empty() && std::all_of(behind.marks.begin(), behind.marks.end(),
                                                          [&](const auto& mark) { return mark->value == carried; });
    TESSERA_CHECK_VALUE(alike, "engine.scale",
                        "parts of this tensor carry a loss scale already and others another one or none; scale the sum "
                        "of the losses");
    value = std::min(scale, carried);
    behind.visit(std::exchange(behind.held, {}), /*through=*/true);
  }
  const torch::autograd::AutoGradMode with_grad(true);
  const bool narrow = x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
  at::Tensor scaled = (narrow ? x.to(at::kFloat) : x).mul(value / carried);
  const auto mark = std::make_shared<ScaleMark>();
  mark->owner = link_;
  mark->value = value;
  mark->ends.assign(behind.ends.begin(), behind.ends.end());
  if (std::find(behind.ends.begin(), behind.ends.end(), link_) == behind.ends.end()) mark->ends.push_back(link_);
  mark->outputs.insert(behind.outputs.begin(), behind.outputs.end());
  for (const auto& inner : behind.marks)
    inner->around.push_back(mark);
  scaled.grad_fn()->add_pre_hook(std::make_unique<ScaleHook>(mark));
  return scaled;
}

void Hooks::check_output() {
  if (excused()) return;
  passed_outputs_ = true;
  const auto task = tasks_.find(torch::autograd::get_current_graph_task_id());
  if (task == tasks_.end() || !task->second.plain) return;  // torch.autograd.grad: the parameters will tell
  const bool trained = task_runs([&](torch::autograd::Node& node) {
    const auto* hook = find_hook<ReadyHook>(node.post_hooks());
    return hook != nullptr && hook->link == link_;
  });
  if (trained) HookAccess::refuse_unscaled();
}

// A gradient came that no mark has announced. It may only be early: parameters beside the outputs are not ordered.
bool Hooks::refuses_parameter() {
  if (excused()) return false;
  if (passed_outputs_) return true;
  const int task = torch::autograd::get_current_graph_task_id();
  if (searched_task_ == task) return false;
  searched_task_ = task;
  const bool marked = task_runs([&](torch::autograd::Node& node) {
    const auto* hook = find_hook<ScaleHook>(node.pre_hooks());
    return hook != nullptr && hook->mark->owner.lock() == link_;
  });
  if (marked) return false;
  return task_runs([&](torch::autograd::Node& node) { return is_output_of(node, link_); });
}

// A mark was met first. An output with parameters behind it that no mark covers is a forgotten part of the loss: its
// gradients would count as scaled.
void Hooks::check_all_scaled() {
  if (!guarded_ || in_forward_task_) return;
  std::vector<torch::autograd::Node*> outputs;
  std::vector<std::shared_ptr<ScaleMark>> marks = marks_;  // autograd does not list the root, which may be a mark
  task_runs([&](torch::autograd::Node& node) {
    if (is_output_of(node, link_)) outputs.push_back(&node);
    if (const auto* hook = find_hook<ScaleHook>(node.pre_hooks())) marks.push_back(hook->mark);
    return false;  // on to the next one
  });
  for (torch::autograd::Node* node : outputs) {
    if (std::any_of(marks.begin(), marks.end(), [&](const auto& mark) { return mark->outputs.contains(node); }))
      continue;
    Behind behind;
    behind.visit({node}, /*through=*/true);
    if (std::find(behind.ends.begin(), behind.ends.end(), link_) != behind.ends.end()) HookAccess::refuse_unscaled();
  }
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

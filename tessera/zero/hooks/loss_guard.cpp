// Hooks: loss scaling, and the guard of backwards without it.
#include <ATen/ops/mul.h>
#include <optional>

#include "tessera/zero/hooks/nodes.h"

namespace tessera::zero {

void ScaleMark::run(const std::shared_ptr<ScaleMark>& self) {
  TESSERA_CHECK(!spent, "engine.scale",
                "one scale() allows one backward, and this one was used. Loss scaling is required again: call "
                "engine.scale(loss) for every backward");
  task = torch::autograd::get_current_graph_task_id();
  // In b.scale(a.scale(loss)) the mark of b runs first, and all engines have noted its value, which covers both scales.
  const bool noted = std::any_of(around.begin(), around.end(), [&](const auto& other) {
    const auto mark = other.lock();
    return mark && mark->task == task;
  });
  const auto asked = owner.lock();
  for (const auto& end : ends) {
    const auto shared = end.lock();
    if (!shared) continue;
    const std::lock_guard lock(shared->mutex);
    if (shared->hooks == nullptr) continue;
    shared->hooks->touch_task(false);
    if (!noted) shared->hooks->note_scale(value);
    if (shared == asked) {
      auto& guard = shared->hooks->loss_guard_;
      guard.marks.push_back(self);
      if (!guard.allowed) shared->hooks->check_all_scaled();
      guard.allowed = true;
    }
  }
}

void Hooks::note_scale(double value) {
  std::optional<double>& scale = loss_guard_.scale;
  TESSERA_CHECK(scale.value_or(value) == value, "engine.scale", "one backward reaches an engine with two scales, ",
                *scale, " and ", value,
                ": scale the sum of the losses, or call backward() on each; several engines scale one loss as "
                "a.scale(b.scale(loss))");
  scale = value;
}

namespace {

bool is_output_of(torch::autograd::Node& node, const SharedPtr& shared) {
  const auto& hooks = node.pre_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) {
    const auto* output = dynamic_cast<const OutputHook*>(hook.get());
    return output != nullptr && output->shared == shared;
  });
}

// The part of a graph behind some nodes.
struct Behind {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<std::shared_ptr<ScaleMark>> marks;
  std::vector<SharedPtr> ends;  // engines whose parameters are there

  // Visits the graph behind `from`, not beyond marks unless `through`. Nodes of earlier calls are not visited again.
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
      if (const auto* end = find_hook<ParamHook>(node->tensor_pre_hooks())) {
        if (std::find(ends.begin(), ends.end(), end->shared) == ends.end()) ends.push_back(end->shared);
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
  mark->owner = shared_;
  mark->value = value;
  mark->ends.assign(behind.ends.begin(), behind.ends.end());
  if (std::find(behind.ends.begin(), behind.ends.end(), shared_) == behind.ends.end()) mark->ends.push_back(shared_);
  mark->outputs.insert(behind.outputs.begin(), behind.outputs.end());
  for (const auto& inner : behind.marks)
    inner->around.push_back(mark);
  scaled.grad_fn()->add_pre_hook(std::make_unique<ScaleHook>(mark));
  return scaled;
}

void Hooks::check_output() {
  if (excused()) return;
  loss_guard_.passed_outputs = true;
  const auto task = tasks_.find(torch::autograd::get_current_graph_task_id());
  if (task == tasks_.end() || !task->second.plain) return;  // torch.autograd.grad: the parameters will tell
  const bool trained = task_runs([&](torch::autograd::Node& node) {
    const auto* hook = find_hook<ParamHook>(node.tensor_pre_hooks());
    return hook != nullptr && hook->shared == shared_;
  });
  if (trained) HookAccess::refuse_unscaled();
}

// A gradient came that no mark has announced. The mark may still come: parameters beside the outputs are not ordered.
bool Hooks::refuses_parameter() {
  if (excused()) return false;
  if (loss_guard_.passed_outputs) return true;
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(loss_guard_.searched_task, task) == task) return false;
  const bool marked = task_runs([&](torch::autograd::Node& node) {
    const auto* hook = find_hook<ScaleHook>(node.pre_hooks());
    return hook != nullptr && hook->mark->owner.lock() == shared_;
  });
  if (marked) return false;
  return task_runs([&](torch::autograd::Node& node) { return is_output_of(node, shared_); });
}

// A mark was met first. An output with parameters behind it that no mark covers is a forgotten part of the loss, whose
// gradients would count as scaled.
void Hooks::check_all_scaled() {
  if (!guarded_ || in_forward_task_) return;
  std::vector<torch::autograd::Node*> outputs;
  std::vector<std::shared_ptr<ScaleMark>> marks =
      loss_guard_.marks;  // autograd does not list the root, which may be a mark
  task_runs([&](torch::autograd::Node& node) {
    if (is_output_of(node, shared_)) outputs.push_back(&node);
    if (const auto* hook = find_hook<ScaleHook>(node.pre_hooks())) marks.push_back(hook->mark);
    return false;  // on to the next one
  });
  for (torch::autograd::Node* node : outputs) {
    if (std::any_of(marks.begin(), marks.end(), [&](const auto& mark) { return mark->outputs.contains(node); }))
      continue;
    Behind behind;
    behind.visit({node}, /*through=*/true);
    if (std::find(behind.ends.begin(), behind.ends.end(), shared_) != behind.ends.end()) HookAccess::refuse_unscaled();
  }
}

}  // namespace tessera::zero

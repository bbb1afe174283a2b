// Hooks: graph tasks, from the first hook that runs in one to the rounds of its end.
#include <iterator>
#include <optional>

#include "tessera/zero/hooks/nodes.h"

namespace tessera::zero {

void Hooks::Shared::run_or_keep(std::function<void(Hooks&)> what) {
  if (const std::unique_lock lock(mutex, std::try_to_lock); lock.owns_lock()) {
    if (hooks != nullptr) what(*hooks);
    return;
  }
  const std::lock_guard lock(kept_mutex);
  kept.push_back(std::move(what));
}

void Hooks::run_kept() {
  const std::lock_guard lock(shared_->mutex);
  std::vector<std::function<void(Hooks&)>> kept;
  {
    const std::lock_guard guard(shared_->kept_mutex);
    kept.swap(shared_->kept);
  }
  for (const auto& what : kept)
    what(*this);
  end_gone_tasks();
}

Hooks::Hooks(HookSink& sink, ReaderLock lock)
    : sink_(sink), lock_(std::move(lock)), shared_(std::make_shared<Shared>()) {
  shared_->hooks = this;
}

Hooks::~Hooks() {
  remove();
}

bool Hooks::inside_task() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

bool Hooks::on_autograd_thread(c10::DeviceType device) {
  return inside_task() && (device != c10::DeviceType::CPU || current_graph_task().reentrant_depth_ > 0);
}

void Hooks::enter_forward() {
  const std::lock_guard lock(shared_->mutex);
  run_kept();
  ++forward_depth_;
}

void Hooks::leave_forward() {
  const std::lock_guard lock(shared_->mutex);
  --forward_depth_;
}

bool Hooks::in_backward() {
  const std::lock_guard lock(shared_->mutex);
  run_kept();
  return !tasks_.empty();
}

// Forgets tasks that threw; others are taken off as they end. Tokens that die by this come back here once this is done.
void Hooks::end_gone_tasks() {
  std::vector<std::shared_ptr<const torch::autograd::GraphTask>> held;
  const auto is_gone = [&](const auto& entry) {
    held.push_back(entry.second.task.lock());
    return !held.back() || held.back()->future_result_->completed();
  };
  if (std::erase_if(tasks_, is_gone) == 0) return;
  std::erase_if(deferred_, [&](const Deferred& d) { return !tasks_.contains(d.task); });
  if (!tasks_.empty()) return;
  outer_pending_ = false;
  sink_.tasks_ended();
}

// Whether a task ends inside a node of another task, which no hook of ours has seen (a module called directly, with re-entrant
// checkpoints inside): the outer one is the backward. It is noted at the nodes behind, which run next in it.
bool Hooks::leave_to_outer_task() {
  const auto node = torch::autograd::get_current_node();
  outer_pending_ = false;
  if (!node || in_forward_task_) return false;
  const auto is_ours = [&](const auto& hook) {
    const auto* outer = dynamic_cast<const OuterTaskHook*>(hook.get());
    return outer != nullptr && outer->shared == shared_;
  };
  for (const torch::autograd::Edge& edge : node->next_edges()) {
    if (!edge.function) continue;
    outer_pending_ = true;
    const auto& hooks = edge.function->pre_hooks();
    if (std::none_of(hooks.begin(), hooks.end(), is_ours))
      edge.function->add_pre_hook(std::make_unique<OuterTaskHook>(shared_));
  }
  return outer_pending_;
}

void Hooks::touch_outer_task() {
  if (!outer_pending_) return;
  const bool counts = counts_;
  touch_task(false);
  counts_ = counts_ || counts;
}

void Hooks::touch_task(bool from_parameter) {
  const int id = torch::autograd::get_current_graph_task_id();
  const torch::autograd::GraphTask& running = current_graph_task();
  TESSERA_CHECK(!running.future_result_->completed(), "engine.backward", "this backward has failed in another thread");
  if (!tasks_.contains(id)) {
    run_kept();
    const bool outermost = tasks_.empty() && !std::exchange(outer_pending_, false);
    auto token = std::make_shared<Token>(shared_, id);
    tasks_[id] = {running.weak_from_this(), running.exec_info_.empty()};
    queue_end(token, -1);
    if (outermost) {
      in_forward_task_ = forward_depth_ > 0;
      counts_ = false;
      loss_guard_ = {};
      if (!in_forward_task_) sink_.backward_begun(calls_to_run());
    }
  }
  if (from_parameter || tasks_[id].plain) counts_ = true;
}

// Queues a round of the end behind what other engines have queued. Round -1: the task is over.
void Hooks::queue_end(const std::shared_ptr<Token>& token, int round) {
  torch::autograd::Engine::get_default_engine().queue_callback([shared = shared_, token, round] {
    const std::lock_guard lock(shared->mutex);
    Hooks* hooks = shared->hooks;
    if (hooks == nullptr) return;
    if (round < 0 ? hooks->end_task(token->id) : hooks->end_round(token->id, round)) hooks->queue_end(token, round + 1);
  });
}

// True when the task was the last one: then rounds are to follow, and until they are done the task counts as running.
bool Hooks::end_task(int id) {
  const auto of_task = [&](const Deferred& d) { return d.task == id; };
  std::vector<Deferred> due;
  std::copy_if(deferred_.begin(), deferred_.end(), std::back_inserter(due), of_task);
  std::erase_if(deferred_, of_task);
  for (const Deferred& deferred : due)
    sink_.call_closed(*deferred.call, info());
  end_gone_tasks();
  if (tasks_.size() > 1 || leave_to_outer_task()) {
    tasks_.erase(id);
    return false;
  }
  if (counts_) {
    for (const auto& mark : loss_guard_.marks)
      mark->spent = true;
  }
  return true;
}

bool Hooks::end_round(int id, int round) {
  if (counts_ && !in_forward_task_ && sink_.end_backward(round)) return true;
  end_gone_tasks();
  tasks_.erase(id);
  if (tasks_.empty()) sink_.tasks_ended();
  return false;
}

void Hooks::remove() {
  const std::lock_guard lock(shared_->mutex);
  shared_->hooks = nullptr;
  const auto held = accumulators_.empty() ? nullptr : without_readers();
  for (const compat::NodePtr& node : accumulators_) {
    if (node) std::erase_if(node->tensor_pre_hooks(), [&](const auto& hook) { return is_of(hook, shared_); });
  }
  accumulators_.clear();
  tasks_.clear();
}

}  // namespace tessera::zero

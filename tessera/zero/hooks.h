// Hooks: the only door to autograd internals (gradient accumulators, graph tasks, engine callbacks).
//
// Note [Parameter side]
//   All backward logic hangs on the gradient accumulators of the parameters and on one callback per graph task. So a loss
//   term outside forward, a custom output class, a module called directly, or a graph through two engines need no
//   special case. Hooks on outputs only mark their graph task early, so that a nested backward is known as nested.
//
// Note [Accumulators change]
//   set_() (torch's register_parametrization() calls it) and conversions (p.data = t of another dtype) make torch forget a
//   parameter's accumulator, while graphs still hold it; the next forward, or the next use, makes another one. So our hook is on
//   the parameter itself: each of its accumulators passes this hook before it runs, and is given the hooks that it lacks.
//   A user's first register_hook() takes ours off; until the next forward puts it back, the accumulator we keep has the hooks.
//
// Note [Once]
//   1/gradient_accumulation_steps is applied where a parameter gradient is accumulated, 1/data-parallel size where it is
//   reduced (reducer.h), and nowhere else: gradients of inputs and torch.autograd.grad are plain PyTorch's.
//
// Note [Graph tasks]
//   Autograd numbers its runs ("graph tasks"). A backward started inside another (re-entrant checkpointing) is a task of
//   its own. A task is noted when one of our hooks runs in it. The backward is done when the last noted task has
//   ended, except inside a forward (a function that runs backward in its forward is no backward of the user's).
//   A task that throws says so before its backward is back with the caller: the next call of the user's or the next task
//   ends what is noted of it, on all ranks at the same place. The death of a task is no such place, because threads of devices
//   hold a task for a while. Where no call follows, a token that dies with the task's callback ends what is noted.
//     task 1   hook (noted) ... node that starts task 2 ....................... hook ... callback: the last one, done
//     task 2                      hook (noted) ... callback: task 1 is left, so not done
//   Runs of torch.autograd.grad pass our output hooks too: they count only once a parameter hook has run.
//
// Note [Ends]
//   Ranks may reach the engines of a joint loss in different orders, so an engine that waits for its reductions could
//   wait for a rank that waits for those of another engine. The end has rounds: every engine's callback does a round and
//   queues the next one behind those of the other engines. All ranks launch what a round waits for in an earlier round.
//
// Note [Loss scaling]
//   scale() multiplies a tensor and marks the node that does it. A backward runs the mark before all nodes behind it. Then
//   every engine with parameters behind the mark, not only the one whose scale() it was, notes what their gradients are
//   multiplied by, to bring them to its own scale; and the guard of the engine whose scale() it was allows this backward.
//   A mark serves one backward. Several engines may scale one loss: scales do not multiply, the smallest holds.
//   A guarded engine refuses a backward through its outputs without its mark, all of them or a part of the loss, before
//   anything is accumulated or gathered. Gradients of parameters that are in the graph beside the outputs (a penalty) are
//   refused with them; a graph that passed no output of the engine (its module called directly) is not guarded and counts
//   as unscaled.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tessera/base/compat.h"
#include "tessera/zero/options.h"
#include "tessera/zero/param_spec.h"
#include "tessera/zero/scope_call.h"

namespace torch::autograd {
struct GraphTask;
}

namespace tessera::zero {

// The running backward, as far as this engine is concerned.
struct BackwardInfo {
  double loss_scale = 1;    // what the backward's gradients are multiplied by: 1 without a mark
  bool in_forward = false;  // the backward is inside a forward in progress (a function that runs backward there)
  bool counts = true;       // the backward is one of the user's, as far as is known: not of torch.autograd.grad
};

// What the hooks report. Called with the hooks' mutex held, on whatever thread autograd uses.
class HookSink {
 public:
  virtual ~HookSink() = default;
  // An outermost backward reached this engine and goes through these watched calls (some of them named twice). Graph
  // tasks inside a forward do not count.
  virtual void backward_begun(const std::vector<ScopeCall*>& calls) = 0;
  // p.grad is about to be accumulated into; the sink may move an old value out of it.
  virtual void before_accumulate(ParamId id, at::Tensor& grad) = 0;
  // p.grad holds the gradient of this graph task for parameter `id` (undefined: zero). `alone`: nobody else has the tensor or
  // its memory, and none of the memory is another tensor's.
  virtual void gradient_ready(ParamId id, at::Tensor& grad, const BackwardInfo& backward, bool alone) = 0;
  // The outermost backward is over: round 0, 1, ... of its end, see Note [Ends]. Returns true while another round is to follow.
  virtual bool end_backward(int round) = 0;
  // No graph task is left, after the last round where it was one of the user's, after torch.autograd.grad, and after a
  // backward that threw (then the sink must not throw itself).
  virtual void tasks_ended() = 0;
  // A watched module call: its backward begins; one of its inputs has its gradient; its graph is gone (must not throw).
  virtual void call_opened(ScopeCall& call, bool again) = 0;
  virtual void call_closed(ScopeCall& call, const BackwardInfo& backward) = 0;
  virtual void call_gone(ScopeCall& call) = 0;
};

struct ScaleMark;

class Hooks {
 public:
  // `lock` is held while hooks on a parameter change.
  explicit Hooks(HookSink& sink, ReaderLock lock = {});
  ~Hooks();
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;

  // Whether another live engine has hooked `param`.
  static bool is_watched(const at::Tensor& param);
  // Hooks `param` (requires grad).
  void watch(const at::Tensor& param, ParamId id);
  // Whether our hook is on `param`; false also where a user has taken it off: Note [Accumulators change].
  bool watches(const at::Tensor& param) const;
  // Marks the graph tasks that will pass these outputs. Ignores tensors without a graph and functorch wrappers.
  void watch_outputs(const std::vector<at::Tensor>& outputs);

  // Returns the nodes that made a module's inputs, as they are before its forward (which may change the inputs in place). Leaves
  // that this engine or another one trains do not count.
  static std::vector<compat::NodePtr> producers_of(const std::vector<at::Tensor>& inputs);
  // Reports the backward of a module call: opened before the first node behind `outputs` runs, closed for each of
  // `producers`: before it runs or, for an input that is a leaf, at the end of its graph task (until then gradients of
  // parameters may still be on their way). Sets call->producers. Returns false when no output has a graph: nothing is watched.
  bool watch_call(std::shared_ptr<ScopeCall> call, const std::vector<at::Tensor>& outputs,
                  const std::vector<compat::NodePtr>& producers);
  // Whether the calling thread runs a node of a backward, so that a forward is a recomputation.
  static bool inside_task();
  // Whether the calling thread is autograd's own, at work on a backward that another one has called: nodes of a device have a thread
  // for all backwards, and deep re-entrant ones go to a pool; else a node of the CPU runs on the thread that called.
  static bool on_autograd_thread(c10::DeviceType device);

  // ---- loss scaling, see Note [Loss scaling]
  // Whether backwards through the engine's outputs need scale() from now on.
  void guard(bool guarded) { guarded_ = guarded; }
  // Returns x * scale (16-bit tensors as fp32), marked. Value error when parts of x carry a scale already and others do not.
  at::Tensor scale(const at::Tensor& x, double scale);

  void enter_forward();
  void leave_forward();
  bool in_forward() const { return forward_depth_ > 0; }
  // True between the first hook and the end of the outermost backward.
  bool in_backward();

  // Runs what destructors had to leave, and ends backwards that threw: what calls of the user's do first, wherever they
  // gather, release or drop something.
  void run_kept();

  // The node that made `t`; null where there is none, or where torch refuses to say (a view whose base was changed
  // in place: its use is what fails, not its being returned).
  static compat::NodePtr maker_of(const at::Tensor& t);

  // Removes every hook; those in graphs still alive do nothing from now on. Safe to call twice.
  void remove();

  std::recursive_mutex& mutex() { return shared_->mutex; }

  // Shared with the hooks that autograd owns; `hooks` is null once removed.
  // Note [Destructors]
  //   What autograd owns of ours may be freed by any thread, with Python's lock held, while another thread holds the
  //   hooks' mutex and wants Python's (a client's optimizer inside step()). So destructors never wait for the mutex: what
  //   they have to do is kept for the next entry where the mutex is taken.
  struct Shared {
    std::recursive_mutex mutex;
    Hooks* hooks = nullptr;
    std::mutex kept_mutex;
    std::vector<std::function<void(Hooks&)>> kept;

    void run_or_keep(std::function<void(Hooks&)> what);
  };

 private:
  friend struct HookAccess;
  friend struct ScaleMark;
  struct Token;
  struct Deferred {
    int task;
    std::shared_ptr<ScopeCall> call;
  };
  // What Note [Loss scaling] knows of the outermost backward.
  struct LossGuard {
    std::optional<double> scale;                    // the scale that a mark has set
    std::vector<std::shared_ptr<ScaleMark>> marks;  // marks that allow the backward
    bool allowed = false;
    bool passed_outputs = false;  // the backward did, though it may be one of torch.autograd.grad
    int searched_task = -1;       // a task known to pass no output
  };
  struct Task {
    std::weak_ptr<const torch::autograd::GraphTask> task;
    bool plain = false;  // .backward() without inputs=: done even if no parameter hook runs
  };

  void follow(compat::NodePtr node, ParamId id);
  void touch_task(bool from_parameter);
  bool leave_to_outer_task();
  void touch_outer_task();
  std::vector<ScopeCall*> calls_to_run() const;
  void note_scale(double value);
  BackwardInfo info() const { return {loss_guard_.scale.value_or(1.0), in_forward_task_, counts_}; }
  bool excused() const { return !guarded_ || loss_guard_.allowed || in_forward_task_; }
  void check_output();
  void check_all_scaled();
  bool refuses_parameter();
  bool end_task(int id);
  bool end_round(int id, int round);
  void queue_end(const std::shared_ptr<Token>& token, int round);
  void end_gone_tasks();

  std::shared_ptr<void> without_readers() const { return lock_ ? lock_() : nullptr; }

  HookSink& sink_;
  const ReaderLock lock_;
  std::shared_ptr<Shared> shared_;
  std::vector<compat::NodePtr> accumulators_;  // by parameter, the last one, which lives as long as somebody holds it
  std::unordered_map<int, Task> tasks_;
  std::vector<Deferred> deferred_;  // closings of calls
  int forward_depth_ = 0;
  bool counts_ = false;  // the running backward is one of the user's
  bool in_forward_task_ = false;
  bool outer_pending_ = false;  // a task ended inside another one, which is to be noted next

  bool guarded_ = false;
  LossGuard loss_guard_;
  bool watches_calls_ = false;
};

}  // namespace tessera::zero

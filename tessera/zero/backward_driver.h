// BackwardDriver: what autograd's hooks lead to: gradients into units, units into reductions, and their end.
//
// Note [Gradients by hand]
//   p.grad = g, after torch.autograd.grad or over what a backward left, is the gradient of the update, as in PyTorch. At stages
//   1 to 3 nothing of the engine's stands there, so what does is the user's: the whole gradient, of which each rank takes its
//   slice where step() or a norm needs it. Nothing is reduced, as at stage 0; a checksum goes with what ranks compare at
//   every step (Note [What ranks step by]), so that it is an error where ranks put different ones, or not all do. A backward before
//   that adds to it, as to any p.grad, and takes it for this rank's part of the mean; so does who reads or saves the gradients
//   that await their reduction. Zeros after a backward do not take the place of its gradient: p.grad is None there in these
//   stages, and programs fill in what they take for missing.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "tessera/zero/hooks.h"
#include "tessera/zero/reducer.h"
#include "tessera/zero/units.h"

namespace tessera::zero {

// What the engine knows of the running optimizer step.
struct StepState {
  bool boundary = true;       // this micro-batch ends it
  bool hold = false;          // no_sync or coalesce: accumulate locally
  double gradient_scale = 1;  // of the running backward's gradients: 1/gradient_accumulation_steps
  // What accumulated gradients are multiplied by. Those of a backward with another loss scale (that of another engine in a
  // joint loss, or 1 where the engine's outputs were bypassed) are brought to it.
  double loss_scale = 1;
};

class BackwardDriver final : private HookSink {
 public:
  // `step` is asked when a backward comes, on whatever thread autograd uses.
  BackwardDriver(Units& units, std::function<StepState()> step);

  Hooks& hooks() { return hooks_; }
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }

  // Before a forward: what the user did to parameters since the last one. Takes in data that was replaced and hooks
  // parameters that began to require gradients. Local.
  void follow_params();
  // The second of these, of those that wait to be trained. What they have in p.grad from before is not of this update: it
  // is dropped, or, where the update has begun, a state error. Local.
  void follow_waiting();

  // Everything accumulated so far is reduced on return. Collective where something is left to reduce.
  void ensure_reduced();
  // State error where a gradient came past the hooks: to be asked before the former. Local.
  void check_all_watched();
  // Reduces now, whatever the policy. Collective.
  void reduce_now();
  // Along the replicas of hybrid sharding only. Collective.
  void reduce_replicas();
  void drop_gradients();
  // Those of a unit that is updated: their memory goes. Local.
  void used_up(Unit& unit);
  // Frozen parameters that require a gradient now and have a group to join; not those that another engine watches. Local.
  std::vector<ParamId> waiting() const;
  // These are trained now: what waited of their gradients counts, and is reduced where that of the others was. Collective.
  void take_joined(const std::vector<ParamId>& ids);
  // A user sets the gradient of the parameter: there is one from here on. Where no backward ran what they do not set is zero.
  void have_gradient(const Place& place);
  // What a user has put into p.grad since the last backward counts, and at stage 0 what they took away does not. Local.
  void adopt_grads();
  // The same, where that of this parameter is another one.
  void adopt_grad(const Place& place);
  // Stage 0: units of which they took all give their memory back.
  void forget_dropped();
  // Those that adopt_given_grads() took since the last update, as lines that must be the same on all ranks.
  std::vector<std::string> given_lines() const;

  bool has_gradients() const { return unreduced_ || flushed_; }
  // A backward ended without a reduction: the same on all ranks.
  bool unreduced() const { return unreduced_; }
  // Contributions of this rank that no collective has seen (no_sync, stages 0 and 1 before the boundary).
  static bool reads_local_gradient(const Place& place);
  bool flushed() const { return flushed_; }  // reduced since the last step
  // A loss scale came since the last step.
  bool scaled() const { return scaled_; }
  // Gradients were put where they are (accumulation.h).
  void resume(bool unreduced, bool flushed, bool scaled, bool replicas_agree);
  // Backwards of the user's that ended, since the beginning.
  int64_t backwards() const { return backwards_; }
  // A forward of the engine's, with gradients, began: the backward after it is that of another micro-batch.
  void forward_begun() { forward_came_ = true; }
  // The micro-batches so far are counted.
  void step_counted() { of_forwards_.since_step = of_backwards_.since_step = 0; }
  // Of those since the last update or drop_gradients(): that another one followed without a step() between, outside of no_sync
  // and coalesce. Several backwards of one forward (several losses) are one; where all of an update went past the engine
  // (its module was called), each backward is one.
  int64_t unstepped() const { return forwards_count_ ? of_forwards_.unstepped : of_backwards_.unstepped; }

  // Sums over ranks go there from here on, and no buffer keeps them. `sink` must outlive the driver.
  void send_sums_to(SumSink* sink);

  // Nothing comes any more. Local, never waits.
  void remove();

 private:
  void backward_begun(const std::vector<ScopeCall*>& calls) override;
  void before_accumulate(ParamId id, at::Tensor& grad) override;
  void gradient_ready(ParamId id, at::Tensor& grad, const BackwardInfo& backward, bool alone) override;
  bool end_backward(int round) override;
  void tasks_ended() override;
  void call_opened(ScopeCall& call, bool again) override;
  void call_closed(ScopeCall& call, const BackwardInfo& backward) override;
  void call_gone(ScopeCall& call) override;

  void watch(const at::Tensor& param, ParamId id);
  void check_watched(ParamId id) const;
  at::Tensor waiting_sum(ParamId id, const at::Tensor& grad, const BackwardInfo& backward);
  bool may_reduce(const StepState& step) const;
  void count_micro_batch(bool after_forward);
  void check_once(const BackwardInfo& backward) const;
  bool flush_round(int round, const StepState& step);
  void flush();
  void adopt_visible_grads();
  void adopt_visible(const Place& place);
  void part_visible_grads();
  void adopt_given_grads();
  void warn_of_zeros(const Param& param);
  void put_gradient(const Place& place, const at::Tensor& flat);
  void settle_empty_units();
  void show_remote_grads();
  static void check_shape(const Param& param, const at::Tensor& grad);  // state error
  static bool is_visible_view(const Place& place, const at::Tensor& grad);

  Units& units_;
  std::function<StepState()> step_;
  std::unique_ptr<Reducer> reducer_;
  SumSink* sink_ = nullptr;
  std::map<ParamId, at::Tensor> so_far_;  // of gradients that wait, while autograd makes the next one
  std::map<ParamId, int64_t> given_;      // checksums of gradients put by hand
  bool scaled_ = false;
  int64_t backwards_ = 0;
  struct MicroBatches {
    int64_t since_step = 0, unstepped = 0;
    void add() { unstepped += since_step++ > 0 ? 1 : 0; }
  } of_forwards_, of_backwards_;
  bool forward_came_ = false, forwards_count_ = false;  // since the last backward; in this update
  bool by_backwards_ = false;                           // a backward came in this update
  bool warned_of_zeros_ = false;
  bool unreduced_ = false;
  bool flushed_ = false;
  Hooks hooks_;  // last: removed first
};

}  // namespace tessera::zero

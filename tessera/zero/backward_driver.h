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
  // What accumulated gradients are multiplied by. Gradients of a backward with another loss scale (that of another engine in a
  // joint loss, or 1 where the engine's outputs were bypassed) are brought to this one.
  double loss_scale = 1;
};

class BackwardDriver final : private HookSink {
 public:
  // `step` is asked when a backward comes, on whatever thread autograd uses.
  BackwardDriver(Units& units, std::function<StepState()> step);

  Hooks& hooks() { return hooks_; }
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }

  // Before a forward: takes in what the user did to parameters since the last one, namely data that was replaced, and hooks
  // parameters that began to require gradients. Local.
  void follow_params();
  // Hooks parameters that wait to be trained. What they have in p.grad from before is not of this update: it
  // is dropped, or, where the update has begun, a state error. Local.
  void follow_waiting();

  // Everything accumulated so far is reduced on return. Collective where something is left to reduce.
  void ensure_reduced();
  // Throws a state error where a gradient came past the hooks; to be called before ensure_reduced(). Local.
  void check_all_watched();
  // Reduces now, whatever the policy. Collective.
  void reduce_now();
  // Reduces along the replicas of hybrid sharding only. Collective.
  void reduce_replicas();
  void drop_gradients();
  // Frees the gradients of a unit that is updated. Local.
  void used_up(Unit& unit);
  // Frozen parameters that require a gradient now and have a group to join; not those that another engine watches. Local.
  std::vector<ParamId> waiting() const;
  // The parameters `ids` are trained now: their gradients so far count, and are reduced where the others' were. Collective.
  void take_joined(const std::vector<ParamId>& ids);
  // A user sets the gradient of the parameter, which has one from here on. Where no backward ran, elements not set are zero.
  void have_gradient(const Place& place);
  // Takes over what a user has put into p.grad since the last backward and, at stage 0, forgets what they took away. Local.
  void adopt_grads();
  // Does the same where the gradient of this parameter is another tensor than ours.
  void adopt_grad(const Place& place);
  // Stage 0: frees the gradients of units of which the user took all away.
  void forget_dropped();
  // Gradients that adopt_given_grads() took since the last update, as lines that must be the same on all ranks.
  std::vector<std::string> given_lines() const;

  bool has_gradients() const { return unreduced_ || flushed_; }
  // A backward ended without a reduction: the same on all ranks.
  bool unreduced() const { return unreduced_; }
  // Whether the gradient is this rank's contribution, which no collective has seen (no_sync, stages 0 and 1 before the boundary).
  static bool reads_local_gradient(const Place& place);
  bool flushed() const { return flushed_; }  // reduced since the last step
  // A loss scale came since the last step.
  bool scaled() const { return scaled_; }
  // Takes up the state of gradients that Accumulation has put back.
  void resume(bool unreduced, bool flushed, bool scaled, bool replicas_agree);
  // The user's backwards that ended, since the beginning.
  int64_t backwards() const { return backwards_; }
  // The engine began a forward with gradients: the backward after it belongs to another micro-batch.
  void forward_begun() { forward_came_ = true; }
  // The micro-batches so far are counted.
  void step_counted() { of_forwards_.since_step = of_backwards_.since_step = 0; }
  // Micro-batches since the last update or drop_gradients() that another followed without a step() between, outside of no_sync
  // and coalesce. Several backwards of one forward (several losses) are one; where all of an update went past the engine
  // (its module was called), each backward is one.
  int64_t unstepped() const { return forwards_count_ ? of_forwards_.unstepped : of_backwards_.unstepped; }

  // From here on `sink` takes the sums over ranks, and no buffer keeps them. It must outlive the driver.
  void send_sums_to(SumSink& sink);

  // Removes the hooks: no gradient comes any more. Local, never waits.
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
  SumSink no_sink_;
  SumSink* sink_ = &no_sink_;
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

// Engine: builds the parts of one training engine and orders a step. Both front ends (tessera/nn and python/) drive
// this class and nothing below it.
//
//   engine.pre_forward(); outputs = module(...); engine.post_forward(outputs);
//   loss.backward();                  // any autograd call that reaches the parameters; hooks do the rest
//   engine.step();                    // counts a micro-step; at a boundary: norm, clip, update, refresh
//
// One engine belongs to one rank. Calls marked collective must be made by all data-parallel ranks in the same order.
// Calls come from one thread at a time, except that autograd may run the hooks on any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/amp/autocast.h"
#include "tessera/base/held_error.h"
#include "tessera/comm/mesh.h"
#include "tessera/engine/group_fields.h"
#include "tessera/engine/offload_plan.h"
#include "tessera/engine/one_thread.h"
#include "tessera/engine/scaling.h"
#include "tessera/zero/sharded_model.h"

namespace tessera::optim {
struct Type;
}

namespace tessera::engine {

// What a front end calls that has another name in the other one, for errors.
struct CallNames {
  const char* coalesce = "coalesce";
  const char* clip_grad_norm = "clip_grad_norm";
};

struct Options {
  CallNames names;
  zero::Options zero;
  optim::Rule rule = optim::Rule::Adam;
  int64_t micro_batch_size = 1;  // samples of one rank in one forward; only counted
  int64_t gradient_accumulation_steps = 1;
  double gradient_clipping = 1.0;    // largest global L2 norm; 0 turns clipping off
  bool managed_accumulation = true;  // false: every step() is a boundary
  bool precision_of_model = false;   // no precision section: zero.precision follows from the trained parameters' dtype
  std::optional<at::ScalarType> accumulate_in;  // then: the dtype of gradients, where it is not the parameters'
  std::optional<at::ScalarType> sequence_communication;  // zero.communication where several ranks share a sequence
  bool time_device = false;                  // phases begin and end when the device has done its work (base/phases.h)
  bool wants_all_used = false;               // a trained parameter without a gradient is an error of an update
  bool says_some_unused = false;             // the user knows of parameters that have no part in a loss
  bool broadcast_buffers = true;             // broadcast_buffers() does what it says, and nothing without this
  std::string nvme_path;                     // where offload_states() may put what goes to a disk
  OffloadOptions offload;                    // what is found out of zero.ratio and zero.device_share
  std::string schedule;                      // what the configuration says of it, which all ranks must have alike
  const optim::Type* client_type = nullptr;  // Rule::External: whose bounds groups() have, or null
  std::string client_optimizer;   // Rule::External: class and hyper-parameters, which all ranks must have alike
  amp::ScalerOptions scaler;      // loss scaling
  amp::AutocastOptions autocast;  // the dtype that forward computes in
};

class Checkpointer;
using zero::ParamSpec;
using Quantity = shard::Quantity;

class Engine {
 public:
  // Collective: values of rank 0 are broadcast. Value error, before anything is touched, where preflight.h refuses the
  // parameters, ranks build different engines, a parameter with a group is not floating or a device has no kernels.
  Engine(Options options, comm::Mesh mesh, std::vector<ParamSpec> params,
         const std::vector<optim::GroupOptions>& groups);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Copies rank 0's values of a module's buffers (of any dtype) to all ranks, in place, as parameters get them. Collective.
  // For front ends, at construction.
  void broadcast_buffers(const std::vector<at::Tensor>& buffers);

  // State error where the current stream is captured into a graph: zero/units.h, Note [Captured streams]. Forwards with
  // gradients, backwards and steps check it themselves, front ends before other work around these. Local.
  void check_not_captured(const char* call) const;

  // UsageError that names the call once the engine is destroyed. Local.
  void check_live(const char* call) const;

  // A call of a front end that is several of these, until the object goes: UsageError where another thread is in one, also on the
  // other ranks, which would wait for this one. check_one_thread(): the same of a part of a forward or a backward, which threads of
  // autograd's may run; `together` false: other ranks do not wait for it. Local.
  OneThread::Call enter(const char* call);
  void check_one_thread(const char* call, bool together = true);

  // ---- forward
  // From here to the end of the forward, on this thread, autocast is as the options say: on in their dtype, or off even
  // inside a region of the caller's. True when this first switches such a region off: tell the user.
  bool pre_forward();
  // `outputs`: every tensor that the module returned (any nesting, flattened by the front end). Never throws on odd outputs.
  void post_forward(const std::vector<at::Tensor>& outputs);
  // The forward threw: undoes pre_forward.
  void abort_forward();

  // ---- parts. State error once the engine is destroyed.
  zero::Modules& modules();     // what stage 3 needs to know of a forward
  zero::Regions& regions();     // in which parameters are whole
  zero::StateAccess& states();  // by number of the parameter in params()
  // The part of states() that reads no values (local_range(), param_step()), also while states are away.
  const zero::StateAccess& states() const { return layout(); }
  const zero::StateAccess& layout() const;
  zero::Accumulation& accumulation();
  Scaling& scaling();  // loss scale; may be read after destroy()
  const Scaling& scaling() const { return const_cast<Engine*>(this)->scaling(); }
  Checkpointer& checkpoints();  // engine/checkpoint.h

  // ---- backward
  // Brackets engine.backward(loss): checks the loss (value error: "loss must be a scalar tensor ..."), applies the loss
  // scale, notes `scale_wrt_gas` for the backward that follows. Returns the tensor to call backward on.
  at::Tensor begin_backward(const at::Tensor& loss, bool scale_wrt_gas = true);
  // Must follow that backward, also after an exception. Returns loss / gradient_accumulation_steps; loss if not scale_wrt_gas.
  at::Tensor end_backward(const at::Tensor& loss);
  // begin_backward, loss.backward(), end_backward. For C++; Python calls the pieces around its own backward().
  at::Tensor backward(const at::Tensor& loss, bool retain_graph = false, bool scale_wrt_gas = true);

  // ---- step. Collective.
  // Counts a micro-step. At a boundary: norm and finite check, agreed skip or fused update, refresh of the compute
  // parameters, gradients dropped. Returns true when parameters were updated. `external` (Rule::External) is called
  // between clipping and refresh with the master gradients in place (states().local_view(i, Gradient), fp32).
  // `global_norm`: clip to this norm, of several engines (see norm_contribution()), instead of to the engine's own; a norm
  // that is not finite skips the step in every precision, as an overflow does. The same on all ranks. Value error, with
  // nothing counted, for a negative norm, for different ones, and between boundaries, where nothing is clipped; at a boundary
  // also, on all ranks, where ranks differ in rates, accumulation steps or calls (Note [What ranks step by] in agreement.h).
  // `fault`: why this rank cannot step; at a boundary an error on all ranks, with nothing updated or counted. So is what the
  // engine itself has against a step on some ranks only (a call inside no_sync, states that are away). State error, on all ranks,
  // for an update that no backward preceded and that has no gradient at all, unless count_empty_steps() or `global_norm` allows it.
  bool step(const std::function<void()>& external = {}, std::optional<double> global_norm = {},
            const std::string& fault = {});
  // Counts an update without any gradient as any other (accumulation, schedule), with one notice. All ranks call it alike.
  void count_empty_steps();
  // zero::Options::update_in_backward: a fault of the backwards to come, which compare what they update by. Local.
  void set_fault(const std::string& fault);
  // Value error for hyper-parameters in groups() that no configuration could have, or another number of groups; steps say so on all
  // ranks. Local.
  void check_groups(const char* call) const;
  // What a client's optimizer updates by besides groups(): compared by all ranks as groups() are. `lines`: "name value in
  // param group 0". Local.
  void set_client_terms(const std::vector<std::string>& lines, const std::vector<DeviceTerm>& on_device = {});
  // zero::Options::update_runs_on: returns once the last update has come to its end, on all ranks (Note [Updates that run on] in
  // zero/update_lane.h), as forwards without gradients, regions, saves, loads and the next update do themselves. For who reads
  // or writes parameters past the engine between an update and a forward. IoError or OutOfMemoryError, on all ranks, where the
  // update failed. Collective.
  void finish_update();
  // Drops every accumulated gradient, also p.grad. Local.
  void zero_grad();

  // ---- accumulation
  bool is_gradient_accumulation_boundary() const;
  void set_gradient_accumulation_boundary(bool boundary);  // runtime error in unmanaged mode
  // Holds from the present micro-batch on; those that have begun an update count, which comes at once where they are enough.
  void set_gradient_accumulation_steps(int64_t steps);
  void set_micro_batch_size(int64_t samples);
  // no_sync: gradients accumulate locally, no collective; at stage >= 2 this holds one full gradient per unit.
  void begin_no_sync();
  void end_no_sync();
  // coalesce: as no_sync, and end_coalesce() issues one reduction for all backwards inside. Collective at the end.
  void begin_coalesce();
  void end_coalesce();
  // In place of it, for who leaves by an error: what came stays this rank's own, as behind no_sync. Local.
  void leave_coalesce();

  // ---- what happened
  std::optional<double> global_grad_norm() const;  // pre-clip, unscaled, of the last step that was not skipped
  // The norm that zero::Options::previous_clipping goes by: the last update's, or as set; none: the next update is not clipped.
  // For checkpoints. The same on all ranks. Local; may wait for the device.
  std::optional<double> previous_norm() const;
  void set_previous_norm(std::optional<double> norm);
  // A backward has ended since the last optimizer step or zero_grad(). The same on all ranks.
  bool has_gradients() const;
  bool was_step_applied() const;
  int64_t micro_steps() const;
  // Micro-steps since the last boundary: an update comes with the one that makes them gradient_accumulation_steps.
  int64_t begun_micro_steps() const;
  // A backward has ended that no step() has counted. The same on all ranks.
  bool has_uncounted_backward() const;
  // Backwards that reached this engine's parameters and ended, whoever started them.
  int64_t backwards() const;
  int64_t global_steps() const;
  int64_t skipped_steps() const;
  // Samples of all ranks in the optimizer steps so far: those of micro-batches, in unmanaged mode of backwards.
  int64_t global_samples() const;
  // Another number of micro-steps also says how many of them have begun an update: the remainder by
  // gradient_accumulation_steps; set_begun_micro_steps() sets it itself.
  void set_counters(int64_t micro_steps, int64_t global_steps, int64_t skipped_steps, int64_t global_samples);
  void set_begun_micro_steps(int64_t begun);
  // Returns what is to be said to the user of steps that train less than they seem, and of parameters that were thawed and no
  // param group has (notices.h), each once; the front end says it, after a step and before a forward. Only on the first rank of
  // the engine. Local.
  std::vector<std::string> take_notices();
  // The norm of the gradients as they are now, before a step. Error, on all ranks, where ranks differ in what they step by or one
  // cannot step, which `fault` says or the engine finds itself. Collective.
  double grad_norm(const std::string& fault = {});
  // Returns grad_norm() and scales gradients so that it is `max_norm` at most; gradients that are not finite are left to step().
  // Value error, on all ranks, also where ranks give different max_norm. Collective.
  double clip_grad_norm(double max_norm, const std::string& fault = {});
  // Throws what this rank alone has against a step of several engines. Local.
  void check_step() const;
  // This rank's part of the square of grad_norm(): the parts of all ranks of the engine add up to it, replicas counted
  // once, without a loss scale. Not finite where a gradient on this rank is not. Several engines: the square of their
  // common norm is the sum over all ranks of all engines, its root what step() of each takes as global_norm. `without`:
  // numbers of parameters that do not count, as copies of what another engine counts. Errors as of grad_norm(). Collective.
  double norm_contribution(const std::vector<int>& without = {}, const std::string& fault = {});

  // ---- parameters that begin to be trained: Note [Joining] in zero/joining.h
  // One more param group, one more parameter, without a group (ParamSpec::joins); their numbers. Local, but for a parameter
  // with ParamSpec::restore, which is whole from here on. Value error, with nothing changed, for what check_addition() refuses.
  int add_group(const optim::GroupOptions& group);
  int add_param(ParamSpec param);
  // Checks several at once, with parameters (`known`, by number) that are to join a group: value error, by name, for a group that
  // needs states which the others lack, for a parameter that could not be trained beside the others, and for what preflight.h
  // refuses. Local.
  void check_addition(const std::vector<optim::GroupOptions>& groups, const std::vector<ParamSpec>& params,
                      const std::vector<int>& known = {}) const;
  // Sets the group that a parameter without one would join; -1: none. Value error as of check_addition(). Local.
  void set_joins(int param, int group);
  // Trains the parameters that wait from here on; step(), saving and loading do so too. Value error, on all ranks, where ranks
  // wait for different ones. Collective.
  void join();
  // Returns the parameters that have joined since the last call.
  std::vector<int> take_joined();

  // ---- optimizer
  std::vector<optim::GroupOptions>& groups();  // edit lr and friends between steps
  const std::vector<optim::GroupOptions>& groups() const { return const_cast<Engine*>(this)->groups(); }
  const Options& options() const;
  const comm::Mesh& mesh() const;  // without groups once the engine is destroyed

  const std::vector<ParamSpec>& params() const;
  // Writes masters back into the compute parameters (after masters were edited). Collective for sharded states.
  void refresh_params();
  // Takes the values of compute parameters that were edited or loaded as new masters; untouched ones keep the bits of
  // theirs. step() and reading a master do so too. Local.
  void adopt_params();

  // Moves what of `kinds` lives on the device to host memory or into a file in Options::nvme_path, until reload_states():
  // room for other engines. Values that live elsewhere anyway stay there; values already away, too. Meanwhile forward, backward,
  // step and whatever reads or writes states are state errors. For a model on the CPU Residence::Host changes nothing, with
  // a warning, once. Value error in stage 0, with offload_param, for a client's optimizer and for a disk without a path.
  // State error inside a forward or a region. Local, but for an update that runs on, which comes to its end first; done on return.
  void offload_states(const std::vector<zero::StateKind>& kinds, shard::Residence to = shard::Residence::Host,
                      bool pin_memory = true);
  void reload_states();
  bool states_are_away() const;

  using Memory = zero::Memory;
  Memory memory() const;
  // Which of device and host updates what of the states, and how long that takes, where rates were measured: when the engine was
  // built, or by measure_offload(), in some 100 ms. State error while states are away (offload_states()). The plan is local; a
  // measurement is collective, and ends an update that runs on first; an IoError or OutOfMemoryError of any rank is one of all.
  OffloadPlan offload_plan() const;
  void measure_offload();
  // How much time the steps so far spent where; Options::time_device makes it true of a device, too. State error once destroyed.
  const Phases& phases() const;

  // From here on the losses that backward() gets are kept for take_loss(), which is called after every update.
  void keep_losses();
  // The mean of the losses since the last call; empty where there is none, and where a device would be waited for longer than
  // step() has waited. Local.
  std::optional<double> take_loss();
  // Replaces the losses kept: for a batch that several engines train, whose loss is not this engine's. Local.
  void set_loss(double loss);

  // Removes hooks and frees buffers; parameters keep their values, and partitioned ones that are whole now, as in a region, stay so
  // (else nobody has them). Safe to call twice; later calls throw. Waits for a checkpoint in the background, and throws its error at
  // the end; not where nobody would have the error (`waits` false, as for the destructor): see ~Checkpointer.
  void destroy(bool waits = true);
  bool destroyed() const;
  // What an object around this engine could not throw where it went: the next forward or step of a front end does.
  HeldError& held_error() { return held_error_; }
  // Expires with this object, for what may outlive it.
  std::weak_ptr<const void> life() const { return life_; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  HeldError held_error_;
  std::shared_ptr<const void> life_ = std::make_shared<char>();
};

}  // namespace tessera::engine

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
#include "tessera/amp/grad_scaler.h"
#include "tessera/comm/mesh.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/named_shard.h"
#include "tessera/zero/options.h"

namespace tessera::zero {
struct ParamPartition;
}

namespace tessera::engine {

struct Options {
  zero::Options zero;
  optim::Rule rule = optim::Rule::Adam;
  int64_t micro_batch_size = 1;  // samples of one rank in one forward; only counted
  int64_t gradient_accumulation_steps = 1;
  double gradient_clipping = 1.0;    // largest global L2 norm; 0 turns clipping off
  bool managed_accumulation = true;  // false: every step() is a boundary
  bool precision_of_model = false;   // no precision section: zero.precision follows from the trained parameters' dtype
  std::optional<at::ScalarType> accumulate_in;  // then: the dtype of gradients, where it is not the parameters'
  bool share_buffers = true;                    // broadcast_buffers() does what it says, and nothing without this
  std::string client_optimizer;   // Rule::External: class and hyper-parameters, which all ranks must have alike
  amp::ScalerOptions scaler;      // loss scaling
  amp::AutocastOptions autocast;  // what forward computes in
};

// A parameter as the front end hands it over. Order matters: it is the order of the flat space.
struct ParamSpec {
  std::string name;   // as in named_parameters()
  at::Tensor tensor;  // a leaf; the engine moves its storage into a flat buffer (shard/storage.h)
  int group = -1;     // index of its optimizer group; -1: not optimized (broadcast and cast only)
  std::string unit;   // parameters with one unit name are gathered, reduced and freed together
  std::function<void()> restore =
      {};  // see zero::ModelParam; for a tensor that was partitioned before there was an engine
  std::optional<at::ScalarType> comm = {};  // dtype that it travels in; see zero::ModelParam
};

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

  // Rank 0's values of a module's buffers (of any dtype) on all ranks, in place, as parameters have them. Collective.
  // For front ends, at construction.
  void broadcast_buffers(const std::vector<at::Tensor>& buffers);

  // ---- forward
  // From here to the end of the forward, on this thread, autocast is as the options say: on in their dtype, or off even
  // inside a region of the caller's. True when it first switches such a region off: tell the user.
  bool pre_forward();
  // Every tensor the module returned (any nesting, flattened by the front end). Never throws on odd outputs.
  void post_forward(const std::vector<at::Tensor>& outputs);
  // The forward threw: undoes pre_forward.
  void abort_forward();

  // ---- modules: what stage 3 needs to know of a forward. Front ends call these around the forward of every module that
  // owns parameters; a module inside another one that covers its parameters costs next to nothing.
  // Registers a module that reads `params`; its number, or -1 where nothing is partitioned (and nothing is to be called).
  int add_module(const std::vector<int>& params);
  // Gathers. Collective. True: tell note_inputs() and leave_module() the tensors; false: they are not needed.
  bool enter_module(int module);
  void note_inputs(const std::vector<at::Tensor>& inputs);
  void leave_module(int module, const std::vector<at::Tensor>& outputs);
  void abort_module(int module);  // its forward threw
  bool inside_module() const;
  // A partitioned parameter is read by the module that is running, or by `module`, which does not own it: from now on
  // it is gathered with that module's. Collective when such a module is running.
  void use_elsewhere(int param);
  void register_external(int module, int param);

  // ---- regions in which parameters are whole. Collective, all ranks with the same `params`. Parameters that are not
  // partitioned pass through.
  bool is_gathered(int param) const;
  zero::ParamPartition partition_of(int param) const;
  // State error for a parameter that is in an open region. `writable` false: for reading, and release() without a writer;
  // it spares shared parameters a private copy.
  void gather(const std::vector<int>& params, bool writable = true);
  using Writes = zero::Writes;
  void release(const std::vector<int>& params, Writes writes = Writes::None, int writer = 0);

  // ---- backward
  // Brackets engine.backward(loss): checks the loss (value error: "loss must be a scalar tensor ..."), applies the loss
  // scale, notes `scale_wrt_gas` for the backward that follows. Returns the tensor to call backward on.
  at::Tensor begin_backward(const at::Tensor& loss, bool scale_wrt_gas = true);
  // After it (also after an exception). Returns loss / gradient_accumulation_steps, or the loss for scale_wrt_gas=false.
  at::Tensor end_backward(const at::Tensor& loss);
  // begin_backward, loss.backward(), end_backward. For C++; Python calls the pieces around its own backward().
  at::Tensor backward(const at::Tensor& loss, bool retain_graph = false, bool scale_wrt_gas = true);

  // ---- loss scaling; see Note [Loss scaling] in zero/hooks.h
  // For a direct backward: `x` (a loss, or an output to call backward(gradient) on) times the loss scale; `x` itself
  // where none is needed. Allows one backward. Where one is needed, a backward through outputs of this engine without it
  // is a runtime error of that backward ("Loss scaling is required"), on every rank; the engine stays usable.
  // Value error for a tensor without a graph.
  at::Tensor scale(const at::Tensor& x);
  // The scaler, its scale and its counters. Accumulated gradients (get_full, p.grad) keep the scale that held when the
  // optimizer step began, whatever is set meanwhile; step() divides by it. All ranks set the same.
  const amp::GradScaler& scaler() const;
  void set_loss_scale(double scale);
  void override_loss_scale(double scale);  // fixed and guarded from here on, in every mode
  void restore_scaler(const amp::GradScaler::State& state);
  // What accumulated gradients are multiplied by now.
  double gradient_loss_scale() const;

  // ---- step. Collective.
  // Counts a micro-step. At a boundary: norm and finite check, agreed skip or fused update, refresh of the compute
  // parameters, gradients dropped. Returns true when parameters were updated. `external` (Rule::External) is called
  // between clipping and refresh with the master gradients in place (local_view(i, Gradient), fp32).
  bool step(const std::function<void()>& external = {});
  // Drops every accumulated gradient, also p.grad. Local.
  void zero_grad();

  // ---- accumulation
  bool is_gradient_accumulation_boundary() const;
  void set_gradient_accumulation_boundary(bool boundary);  // runtime error in unmanaged mode
  void set_gradient_accumulation_steps(int64_t steps);
  void set_micro_batch_size(int64_t samples);
  // no_sync: gradients accumulate locally, no collective; at stage >= 2 this holds one full gradient per unit.
  void begin_no_sync();
  void end_no_sync();
  // coalesce: as no_sync, and end_coalesce() issues one reduction for all backwards inside. Collective at the end.
  void begin_coalesce();
  void end_coalesce();

  // ---- what happened
  std::optional<double> global_grad_norm() const;  // pre-clip, unscaled, of the last step that was not skipped
  // A backward has ended since the last optimizer step or zero_grad(). The same on all ranks.
  bool has_gradients() const;
  bool was_step_applied() const;
  int64_t micro_steps() const;
  // Backwards that reached this engine's parameters and ended, whoever started them.
  int64_t backwards() const;
  int64_t global_steps() const;
  int64_t skipped_steps() const;
  // Of all ranks in the optimizer steps so far: micro batches of the steps, unmanaged of the backwards.
  int64_t global_samples() const;
  void set_counters(int64_t micro_steps, int64_t global_steps, int64_t skipped_steps, int64_t global_samples);
  // The norm of the gradients as they are now, before a step. Collective.
  double grad_norm();

  // ---- optimizer
  std::vector<optim::GroupOptions>& groups();  // edit lr and friends between steps
  const Options& options() const;
  const comm::Mesh& mesh() const;  // without groups once the engine is destroyed

  // ---- state access. Parameters are indices into params(); only those with a group have states.
  const std::vector<ParamSpec>& params() const;
  int64_t param_step(int param) const;  // updates applied to it (torch's state["step"])
  void set_param_step(int param, int64_t step);
  // All that this rank holds, by parameter: weights (also those without a group), masters where they are not the weight
  // itself, reduced gradients, optimizer states. Number 0 of every element's replicas taken together are each quantity
  // once. Local. States of a client's own optimizer are the client's: their parts follow local_range().
  std::vector<shard::NamedShard> named_shards() const;
  // Its values, 1-D in the order of its form: a view, in its dtype; a copy for split masters. State error when it is no
  // more there. Local.
  at::Tensor read_shard(const shard::NamedShard& shard);
  // Master, Gradient, State0 or State1 below; value error for Weight, which the parameter itself shows.
  // fp32, shape of the parameter; collective. Undefined tensor when there is none (no gradient, no such state).
  at::Tensor get_full(int param, Quantity what);
  void set_full(int param, Quantity what, const at::Tensor& value);
  // What this rank holds: shaped like the parameter where the buffer is replicated, else 1-D; possibly empty. A view, in
  // the buffer's own dtype; a copy for masters that are split (amp/precision.h).
  at::Tensor local_view(int param, Quantity what);
  // Writes it, whether or not there is a view. Value error when there is nothing of this kind, or another size. Local,
  // but for masters where parameters are shared: collective then.
  void set_local(int param, Quantity what, const at::Tensor& value);
  // This rank's part of the parameter's flattened elements: [begin, end).
  std::pair<int64_t, int64_t> local_range(int param) const;
  // The same for values that the client keeps, such as the states of an optimizer that runs itself. `part`: one value for
  // each element of local_range(), shaped as local_view() is. fp32, shape of the parameter; collective.
  at::Tensor gather_full(int param, const at::Tensor& part);
  // This rank's part of `full`, which has the shape of the parameter; shaped as local_view() is, in the dtype of `full`.
  at::Tensor local_part(int param, const at::Tensor& full);
  // The largest of all ranks' values. Collective.
  double agree_max(double value);
  // Writes masters back into the compute parameters (after masters were edited). Collective for sharded states.
  void refresh_params();
  // Takes the values of compute parameters that were edited or loaded as new masters; untouched ones keep the bits of
  // theirs. step() and reading a master do so too, except for edits that torch does not count (p.data.copy_()). Local.
  void adopt_params();

  // Bytes this engine holds, by kind; the terms of the memory formula.
  struct Memory {
    int64_t params = 0, grads = 0, master = 0, states = 0, buckets = 0;
    int64_t peak_buckets = 0;  // the most they ever were; pools that peak at different moments are added
    int64_t shared = 0;        // compute parameters that all ranks of the host have together: once, not once a rank
  };
  Memory memory() const;

  // Removes hooks and frees buffers; parameters keep their values. Safe to call twice; later calls throw.
  void destroy();
  bool destroyed() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::engine

// Unit: parameters that are reduced, updated and refreshed together, and the flat buffers that hold their states.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/optim/norm.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/placement.h"
#include "tessera/shard/side_stream.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/flat_params.h"
#include "tessera/zero/grad_progress.h"
#include "tessera/zero/host_grads.h"
#include "tessera/zero/options.h"
#include "tessera/zero/param_spec.h"

namespace tessera::zero {

// When a unit's reduction may start before the backward is done. It must be the same moment, between the same gathers,
// on all ranks: see Note [Fixed order] in reducer.h.
enum class LaunchAt : uint8_t {
  Complete,  // all its parameters got gradients
  Over,      // all module calls that used it are through (partitioned parameters)
  Flush,     // not before
};

// A parameter of a unit. Only the unit changes it.
struct Param {
  std::string name;
  at::Tensor tensor;  // the module's own leaf; bound to Unit::flat()
  ParamId id = -1;
  int item = -1;  // number within the unit
  int group = 0;
  shard::Range range;     // in the flat space
  shard::Form form{};     // there
  shard::CutPtr cut{};    // which elements of a whole the parameter is
  int run = -1;           // number of its Run, where Unit::in_pieces()
  uint64_t first = 0;     // number of the whole's first element among all of the model: the key of random bits
  int64_t step = 0;       // updates applied
  WriteCount writes{};    // by the user, since our last one
  bool ahead = false;     // the masters were written to, and the weights have not followed
  at::Tensor known{};     // beside a split master, once a user has written: its owned weights after our last write
  int64_t unwritten = 0;  // updates since the user's last write; no longer known after kFollowed
  ParamGrad grad{};
};

using shard::kTile;

// What can be sent elsewhere for a while (moving.h).
enum class StateKind : uint8_t {
  OptimizerStates,
  Masters,    // separate ones, with residuals; where a weight is its own master there are none
  Weights,    // parameters that the engine holds
  Gradients,  // reduced or accumulated
  Buckets,    // the memory kept for gathers and reductions: freed, and made again when needed
};

// Where a unit's masters and optimizer states are: whether they live where Options::home says, and whether the device updates
// them there, which else their dtype decides (device_of_update()). by_device asks for page-locked memory.
struct StateResidence {
  bool away = true, by_device = false;
};

class Unit {
 public:
  // `ranks`: of this unit; must outlive it. `resident`: parameters stay whole on every rank whatever the stage.
  // `space`: see FlatParams.
  Unit(std::string name, std::vector<Param> params, const Options& options, const shard::StagePlacements& placements,
       bool resident, const Ranks& ranks, at::Tensor space = {}, StateResidence states = {});

  const std::string& name() const { return name_; }
  const Ranks& ranks() const { return ranks_; }  // that exchange the unit's gradients and share its states
  bool is_root() const { return root_; }         // parameters of no repeated block: see kRootUnit
  void make_root(bool root) { root_ = root; }
  const std::vector<Param>& params() const { return params_; }
  const shard::Layout& layout() const { return layout_; }
  shard::Range owned() const { return owned_; }   // range of the flat space whose states this rank keeps
  FlatParams& flat() const { return *flat_; }     // compute parameters, param dtype
  shard::StreamOrder& order() { return order_; }  // of all the unit's memory
  at::ScalarType travel() const {
    return travel_;
  }  // dtype of contributions and sums on their way; cast where it is not that of grads
  void travel_as(at::ScalarType dtype) { travel_ = dtype; }

  // How far the unit's gradients are; the calls below change it, together with the memory that it is about.
  const GradProgress& progress() const { return progress_; }
  bool accumulates() const { return progress_.accumulates(); }
  bool has_sum() const { return progress_.has_sum(); }
  // Begins a new outermost backward: no hook has run in it yet.
  void begin_backward();
  // Begins contributions: whole, in `memory`, a bucket of a pool or the unit's own (undefined: in pieces). On one rank that has a
  // sum they go on there.
  void accumulate_in(at::Tensor memory, bool pooled);
  const at::Tensor& partial() const { return partial_; }  // their memory; undefined where the unit does not accumulate
  // Other changes of GradProgress, which says what each means. launch() and launch_alone() return the contributions' memory, which
  // is no longer the unit's; put_sums() makes sums that are zero.
  void fire(const Param& param) { progress_.fire(own(param).grad); }
  void end_calls() { progress_.end_calls(); }
  at::Tensor launch();
  at::Tensor launch_alone();
  void arrive() { progress_.arrive(); }
  void sum_arrived() { progress_.sum_arrived(); }
  void put_sums();
  uint64_t count_sum() { return progress_.count_sum(); }
  void restore_sums(uint64_t sums) { progress_.restore_sums(sums); }
  // The same of one parameter's gradient.
  void grad_came(const Param& param) { progress_.come(own(param).grad); }
  void fill_grad(const Param& param) { progress_.fill(own(param).grad); }
  void show_grad(const Param& param, bool has) { progress_.show(own(param).grad, has); }
  void drop_grad(const Param& param) { GradProgress::drop(own(param).grad); }
  uint64_t count_addition(const Param& param) { return progress_.count_addition(own(param).grad); }
  void restore_grad(const Param& param, bool has, bool filled, uint64_t additions);
  // Gives the contributions' memory away, as it moves or its values are dropped.
  at::Tensor give_partial() { return std::exchange(partial_, at::Tensor()); }
  // Ends all gradients; the memory of contributions was given away.
  void end_grads();

  // This rank's weights of the owned range: for reading, and to be written.
  shard::Buffer weights() const {
    return owned_ == flat_->slice() ? flat_->slice_values() : shard::Buffer(flat_->whole());
  }
  shard::Buffer weights_to_write();
  // Sums of the owned range, grad dtype; before they are reduced, all contributions where accumulates_in_grads(). Without
  // memory in between. Not defined where the backward updates.
  const shard::Buffer& grads() const { return grads_; }
  // Takes memory for the sums of the owned range, whose contributions no longer lie there.
  void take_grads(shard::Buffer memory) { grads_ = std::move(memory); }
  // All buffers that gradients are kept in.
  std::vector<const shard::Buffer*> grad_buffers() const;
  // The gradients of the owned range, wherever they live; owned_grads(): a view of them where they live on the device.
  shard::Buffer gradients() const;
  at::Tensor owned_grads() const;
  // From now on the owned gradients live in host memory, which host_grads()->take_memory() makes: Note [Gradients leave].
  void send_grads_to_host();
  // Contributions of several backwards add up in grads(): they are whole there until they are reduced, on one rank and in
  // stage 0 after that too.
  bool accumulates_in_grads() const { return in_grads_ && grads_.defined() && !host_grads_; }
  HostGrads* host_grads() const {
    return host_grads_.get();
  }  // the gradients that live in host memory and not on the device; null where there are none
  // Whether gradients lie in separate runs: one rank, all of the unit on the device. Note [Gradients in pieces], contributions.h
  bool in_pieces() const { return !runs_.empty(); }
  void lie_in_pieces();
  // In pieces: makes memory for the run of `param`, zeros (make_slot(): only what no parameter has is zero); nothing happens where
  // there is some, and elsewhere.
  void make_run(const Param& param);
  void make_slot(const Param& param);
  // Whether the gradient of `param` has a tensor of its own, which may be one of autograd's.
  bool lies_alone(const Param& param) const { return in_pieces() && runs_[param.run].alone; }
  // Such a gradient is `row` from now on; drop_row(): it has no memory any more.
  void keep_row(const Param& param, at::Tensor row);
  void drop_row(const Param& param) { drop_run(runs_[param.run]); }
  // Where contributions to `param` add up, and whether that has memory.
  shard::Memory slot(const Param& param) const;
  bool has_slot(const Param& param) const { return !in_pieces() || runs_[param.run].grad.has_memory(); }
  // The buffer with the gradient of elements `range` of the owned range, which are all of `param`, and their place in the buffer.
  std::pair<shard::Buffer, shard::Range> gradient(const Param& param, shard::Range range) const;
  // All elements of `param`: where its contributions add up (while accumulates()), and as p.grad shows them in stage 0.
  at::Tensor contribution(const Param& param) const;
  at::Tensor visible(const Param& param) const;
  // The pieces of elements `range` of the owned range that have memory.
  std::vector<optim::Piece> pieces(shard::Range range) const;
  // Makes memory of the device for `numel` gradients, the layout's or the owned range's; contents are undefined where there
  // was none of that size. Note [Gradients on demand]
  void make_grads(int64_t numel);
  // Frees the gradients' memory, in the order of all streams.
  void drop_grads();
  // The gradients' dtype and device, whether or not a buffer is kept for them.
  at::TensorOptions grad_options() const;
  // The weights of parameter `item` that this rank owns: a view where they live on the device, else a copy.
  at::Tensor owned_values(int item) const;
  // The part of `param` that this rank owns, in the coordinates of the owned range; empty if none.
  shard::Range owned_slice(const Param& param) const;

  // The sum of squares of the owned gradients that the backward updated with, where they were; else undefined.
  const at::Tensor& squares() const { return squares_; }
  void note_squares(at::Tensor squares) { squares_ = std::move(squares); }
  void drop_squares();
  // Gradients of the owned range that a client's optimizer reads, only while it runs.
  const at::Tensor& client_grads() const { return client_grads_; }
  void lend_client_grads(at::Tensor grads) { client_grads_ = std::move(grads); }

  // Who gives the current stream work on the gradients or states calls this first: Note [Streams of the user's].
  void on_this_stream() { order_.write(flat_->options().device()); }

  // Whether the compute parameter itself is the master: nothing extra is stored.
  bool master_is_weight() const { return !master_.defined() && !residual_.defined(); }
  const shard::Buffer& master() const { return master_; }                 // owned range, fp32; amp::Master::Fp32 only
  const shard::Buffer& residual() const { return residual_; }             // owned range, int16; amp::Master::Split only
  const std::array<shard::Buffer, 2>& states() const { return states_; }  // owned range
  LaunchAt launch_at() const { return launch_at_; }
  // Whether gradients stay whole on every rank (stage 0), so that p.grad can be a view of them.
  bool grads_are_visible() const { return grads_visible_; }

  // The number of the first element of `param` among all of the model.
  void number_from(const Param& param, uint64_t first) { own(param).first = first; }
  // Sets the updates that were applied to `param`; count_update(): one more was, after which the weights are those of the masters.
  void set_step(const Param& param, int64_t step) { own(param).step = step; }
  void count_update(const Param& param);
  // Writes to the masters of `param` follow, and the weights are behind until refresh_weights().
  void masters_lead(const Param& param) { own(param).ahead = true; }
  // The weights of `param` are taken as they are now: writes so far are known, and where `followed` the masters are theirs.
  void know_writes(const Param& param, bool followed = false);

  void allocate_states(int count, const std::vector<optim::GroupOptions>& groups, optim::Rule rule);
  // Sets the owned part of `param` in states()[state] to `value`.
  void fill_state(int state, const Param& param, double value);
  // See Note [Writes that torch does not count] in adoption.h: whether weights of `param` that are not the rounding of their
  // fp32 masters were written to.
  bool adopts(const Param& param) const;
  // Makes masters of such weights that this rank owns.
  void adopt_written(const Param& param);
  // Makes masters of the weights of `param` that this rank owns and that differ from `before`, what they were; other masters
  // keep their bits. Does nothing where the weight is the master.
  void adopt_changed(const Param& param, const at::Tensor& before);
  // Does so with what `param`, which has other data, will bring to its place, where `before` still is.
  void adopt_replaced(const Param& param, const at::Tensor& before);
  // Beside a split master a write does not show in the weights: the first one makes all weights masters, and from
  // then on the weights are noted after each update, to tell later writes.
  void adopt_beside_residual(const Param& param);
  // Notes the weights of `param` after our last write, where they are noted. Allocates nothing.
  void note_weights(const Param& param);
  // Notes masters and weights after an update of the parameters that are `present`, by number, once it is there: a user who has
  // written once only does not pay for ever.
  void note_updated(const std::vector<bool>& present);
  // Sets when the user last wrote: `unwritten` updates ago; empty: never.
  void follow(const Param& param, std::optional<int64_t> unwritten);
  // Notes the version of the master, whose buffer may be another tensor now.
  void note_master();
  // Sets masters of the owned range from `param`'s present values (any dtype), shape of the parameter.
  void set_master_from(const Param& param, const at::Tensor& values);
  // Reads masters of `range` of the owned range: a view where they are a buffer, else a copy, fp32.
  at::Tensor read_master(shard::Range range) const;
  // Copies `values` into these masters. The weights follow where they are part of the master, else in refresh_weights().
  void write_master(shard::Range range, const at::Tensor& values);
  const StateResidence& state_residence() const { return state_residence_; }
  // Buffers of master, residual and states, whether or not there are such.
  std::array<const shard::Buffer*, 4> state_buffers() const { return {&master_, &residual_, &states_[0], &states_[1]}; }
  // Moves what of `kind` lives on the device to what `home` makes for it; null: it stays. Contributions that lie in such gradients go
  // with them.
  void send(StateKind kind, const HomeMaker& home);
  // Brings it back, but for the weights, which flat() brings.
  void bring_back();
  bool is_sent() const;  // whether anything of the unit's is away by send(), or by flat()
  // Returns when what was written to these, or to the weights, is where they live; throws what went wrong on the way.
  void flush() const;
  // Frees gradients, masters and states.
  void drop_states();
  // Before the unit goes: what streams of a device still do with its memory comes to its end first. Local, never waits.
  void let_go() noexcept;
  // Refreshes the owned weights from an fp32 master; nothing to do in the other forms.
  void refresh_weights();

 private:
  // Parameters that lie one after the other, and whose gradients have memory together; without memory they are zero.
  struct Run {
    shard::Range range;  // in the flat space
    bool alone = false;  // one parameter
    shard::Buffer grad;
  };

  Param& own(const Param& param) { return params_[param.item]; }
  void drop_run(Run& run);
  std::vector<shard::Buffer*> sendable();  // all but the weights'
  shard::Buffer make(shard::Quantity what, const at::TensorOptions& options) const;
  void note_updated(Param& param);
  void adopt_changed(const Param& param, const at::Tensor& before, const at::Tensor& now);
  void adopt_tile(shard::Range tile, const at::Tensor& same, const at::Tensor& now);

  int64_t master_version() const { return master_.is_here() ? master_.tensor()._version() : 0; }

  std::string name_;
  const Ranks& ranks_;
  std::vector<Param> params_;
  shard::Layout layout_;
  shard::Range owned_;
  std::unique_ptr<FlatParams> flat_;
  Options options_;
  StateResidence state_residence_;
  bool root_ = false;
  at::ScalarType travel_;
  LaunchAt launch_at_ = LaunchAt::Complete;

  GradProgress progress_;
  bool grads_visible_ = false, in_grads_ = false;
  shard::Buffer grads_;
  std::vector<Run> runs_;  // in place of grads_, where in_pieces()
  std::shared_ptr<HostGrads> host_grads_;
  at::Tensor partial_;            // grads_ itself or a pooled bucket
  bool partial_is_sent_ = false;  // with grads_
  at::Tensor squares_, client_grads_;

  shard::Buffer master_, residual_;
  std::array<shard::Buffer, 2> states_;
  int64_t known_master_ = 0;  // version after our last write: another version is that of a user who wrote to a view
  shard::StreamOrder order_;
};

}  // namespace tessera::zero

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
#include "tessera/shard/layout.h"
#include "tessera/shard/placement.h"
#include "tessera/shard/side_stream.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/flat_params.h"
#include "tessera/zero/host_grads.h"
#include "tessera/zero/options.h"
#include "tessera/zero/param_spec.h"

namespace tessera::zero {

// Gradients of a unit within one optimizer step.
enum class GradState : uint8_t {
  Empty,         // nothing; persistent buffers hold old values that will be overwritten
  Accumulating,  // local contributions of this rank in `partial`
  // As Accumulating, but they came after the unit's launch in their backward (from a nested one, or a use outside of the
  // modules that own the parameter): the next reduction takes them in.
  Late,
  Reducing,  // a collective is on its way; contributions that come meanwhile lead to Accumulating
  Reduced,   // the owned range holds the sum over ranks; more may be added (Accumulating again)
};
const char* grad_state_name(GradState state);

// A unit's reduction within one backward.
enum class Turn : uint8_t {
  Waiting,   // not yet
  Over,      // all module calls that used the unit are through the backward
  Launched,  // on its way, or done
};

// When a unit's reduction may start before the backward is done. It must be the same moment, between the same gathers,
// on all ranks: see Note [Fixed order] in reducer.h.
enum class LaunchAt : uint8_t {
  Complete,  // all its parameters got gradients
  Over,      // all module calls that used it are through (partitioned parameters)
  Flush,     // not before
};

struct Param {
  std::string name;
  at::Tensor tensor;  // the module's own leaf; bound to Unit::flat
  ParamId id = -1;
  int group = 0;
  shard::Range range;      // in the flat space
  shard::Form form{};      // there
  shard::CutPtr cut{};     // which elements of a whole it is
  int run = -1;            // of Unit::runs, where in_pieces()
  uint64_t first = 0;      // number of the whole's first element among all of the model: the key of random bits
  int64_t step = 0;        // updates applied
  WriteCount writes{};     // by the user, since our last one
  bool ahead = false;      // its masters were written to, and its weights have not followed
  at::Tensor known{};      // beside a split master, once a user has written: its owned weights after our last write
  int64_t unwritten = 0;   // updates since then; no longer known after kFollowed
  uint64_t additions = 0;  // of this rank to its gradient since the last step, as far as rounded stochastically
  bool has_grad = false;   // this rank saw a gradient since the last step
  bool filled = false;     // its slot in `partial` holds a contribution
  bool fired = false;      // its hook ran in the running backward
};

// Parameters that lie one after the other, and whose gradients have memory together; without memory they are zero.
struct Run {
  shard::Range range;  // in the flat space
  bool alone = false;  // one parameter, whose gradient may be a tensor of autograd's
  shard::Buffer grad;
};

using shard::kTile;

// Of a unit's masters and optimizer states: whether they live where Options::home says, and whether the device updates them
// there, which else their dtype decides (place_of_update()). Page-locked memory is asked for then.
struct StatePlace {
  bool away = true, by_device = false;
};

class Unit {
 public:
  // `ranks`: of this unit; must outlive it. `resident`: its parameters stay whole on every rank whatever the stage.
  // `space`: see FlatParams.
  Unit(std::string name, std::vector<Param> params, const Options& options, const shard::StagePlacements& placements,
       bool resident, const Ranks& ranks, at::Tensor space = {}, StatePlace states = {});

  // Moves on or throws: Empty -> Accumulating (-> Late) -> Reducing -> Reduced -> Accumulating ..., any -> Empty.
  void move_to(GradState next);
  GradState grad_state() const { return grad_state_; }
  bool accumulates() const { return grad_state_ == GradState::Accumulating || grad_state_ == GradState::Late; }
  // Moves on or throws: Waiting (-> Over) -> Launched -> Launched (late gradients), any -> Waiting with a new backward.
  void move_to(Turn next);
  Turn turn() const { return turn_; }
  // The table of moves covers what follows from the state: `partial` is there in Accumulating and Late, `sums` and has_sum()
  // end with Empty. It does not cover what goes on beside it: `fired` and Param::fired belong to a backward, `in_flight` to
  // collectives (a unit may accumulate while one is on its way), Param::has_grad and `filled` to single parameters.
  // The owned range of `grads` holds a sum over ranks, until Empty.
  void sum_arrived() { has_sum_ = true; }
  bool has_sum() const { return has_sum_; }

  // This rank's weights of the owned range: for reading, and to be written.
  shard::Buffer weights() const { return owned == flat->slice() ? flat->slice_values() : shard::Buffer(flat->whole()); }
  shard::Buffer weights_to_write();
  // The gradients of that range: wherever they live, and a view of them where that is the device.
  shard::Buffer gradients() const;
  at::Tensor owned_grads() const;
  // From now on they live in host memory, which host_grads->take_memory() makes: Note [Gradients leave].
  void send_grads_to_host();
  // Contributions of several backwards add up in `grads`: they are whole there until they are reduced, on one rank and in
  // stage 0 after that too.
  bool accumulates_in_grads() const { return in_grads_ && grads.defined() && !host_grads; }
  // Gradients lie in `runs`: one rank, where all of the unit lives on the device. Note [Gradients in pieces] in contributions.h
  bool in_pieces() const { return !runs.empty(); }
  void lie_in_pieces();
  // Memory for the run of `param`, zeros; nothing happens where there is some.
  void make_run(const Param& param);
  void drop_run(Run& run);
  Run& run_of(const Param& param) { return runs[param.run]; }
  // The buffer that has the gradient of elements `range` of the owned range, all of them of `param`, and where they are there.
  std::pair<shard::Buffer, shard::Range> gradient(const Param& param, shard::Range range) const;
  // All elements of `param`: where its contributions add up (while accumulates()), and as p.grad shows them in stage 0.
  at::Tensor contribution(const Param& param) const;
  at::Tensor visible(const Param& param) const;
  // Of elements `range` of the owned range, those that have memory.
  std::vector<optim::Piece> pieces(shard::Range range) const;
  // Memory of the device for `numel` of them, the layout's or those of the owned range; contents are undefined where there
  // was none of that size. Note [Gradients on demand]
  void make_grads(int64_t numel);
  // Sums that are zero: in pieces there is nothing to make.
  void make_sums();
  // That memory goes, in the order of all streams.
  void drop_grads();
  // Of gradients, whether or not a buffer is kept for them.
  at::TensorOptions grad_options() const;
  // The weights of parameter `item` that this rank owns: a view where they live on the device, else a copy.
  at::Tensor owned_values(int item) const;
  // The part of `param` that this rank owns, in the coordinates of the owned range; empty if none.
  shard::Range owned_slice(const Param& param) const;

  // Who gives the current stream work on its gradients or states calls this first: Note [Streams of the user's].
  void on_this_stream() { order.write(flat->options().device()); }

  // The compute parameter itself is the master: nothing extra is stored.
  bool master_is_weight() const { return !master.defined() && !residual.defined(); }
  LaunchAt launch_at() const { return launch_at_; }
  // The hooks of all parameters that require gradients ran in the running backward.
  bool complete() const { return fired >= expected; }
  // Gradients stay whole on every rank (stage 0), so that p.grad can be a view of them.
  bool grads_are_visible() const { return grads_visible_; }

  void allocate_states(int count, const std::vector<optim::GroupOptions>& groups, optim::Rule rule);
  // The owned part of `param` in states[state] becomes `value`.
  void fill_state(int state, const Param& param, double value);
  // See Note [Writes that torch does not count] in adoption.h: whether weights of `param` that are not the rounding of their
  // fp32 masters were written to.
  bool adopts(const Param& param) const;
  // Such ones that this rank owns become masters.
  void adopt_written(const Param& param);
  // Weights of `param` that this rank owns and that are not what they were, `before`, become masters; those of the others keep
  // their bits. Nothing to do where the weight is the master.
  void adopt_changed(const Param& param, const at::Tensor& before);
  // The same of what `param`, which has other data, will bring to its place, where `before` still is.
  void adopt_replaced(const Param& param, const at::Tensor& before);
  // Beside a split master a write does not show in what stands there: the first one makes all weights masters, and from
  // then on what they were is known after each update.
  void adopt_beside_residual(Param& param);
  // Allocates nothing.
  void note_weights(Param& param);
  // The same after an update of the parameters that are `present`, by number, once it is there: who has written once only does not
  // pay for ever.
  void note_updated(const std::vector<bool>& present);
  // As if the last write had been `unwritten` updates ago; empty: as if there had been none.
  void follow(Param& param, std::optional<int64_t> unwritten);
  // Its buffer may be another tensor now.
  void note_master();
  // Masters of the owned range from `param`'s present values (any dtype), shape of the parameter.
  void set_master_from(const Param& param, const at::Tensor& values);
  // Masters of `range` of the owned range: a view where they are a buffer, else a copy, fp32.
  at::Tensor read_master(shard::Range range) const;
  // Copies `values` into them. The weights follow where they are part of the master, else in refresh_weights().
  void write_master(shard::Range range, const at::Tensor& values);
  const StatePlace& state_place() const { return state_place_; }
  // Master, residual and states, whether or not there are such.
  std::array<const shard::Buffer*, 4> state_buffers() const { return {&master, &residual, &states[0], &states[1]}; }
  // Returns when what was written to them, or to the weights, is where they live; throws what went wrong on the way.
  void flush() const;
  // Gradients, masters and states are gone.
  void drop_states();
  // Before it goes: what streams of a device still do with its memory comes to its end first. Local, never waits.
  void let_go() noexcept;
  // The owned weights from an fp32 master; nothing to do in the other forms.
  void refresh_weights();

  std::string name;
  const Ranks& ranks;  // that exchange its gradients and share its states
  bool root = false;   // what no repeated block owns: see kRootUnit
  std::vector<Param> params;
  shard::Layout layout;
  shard::Range owned;                // range of the flat space whose states this rank keeps
  std::unique_ptr<FlatParams> flat;  // compute parameters, param dtype
  // Sums of the owned range, grad dtype; before they are reduced, all contributions where accumulates_in_grads(). Without
  // memory in between. None where the backward updates.
  shard::Buffer grads;
  std::vector<Run> runs;                  // instead of `grads`, where in_pieces()
  std::shared_ptr<HostGrads> host_grads;  // where they live that do not live on the device; else null
  at::Tensor partial;  // local contributions, whole: `grads` itself or a pooled bucket; undefined while Empty
  bool partial_pooled = false;
  at::ScalarType travel;   // dtype of contributions and sums on their way; cast where it is not that of grads
  uint64_t sums = 0;       // added to it since the last step, as far as rounded stochastically
  at::Tensor squares;      // sum of squares of the owned gradients that the backward updated with, where they were
  int fired = 0;           // params whose hook ran in the running backward
  int expected = 0;        // params that require gradients
  int in_flight = 0;       // reductions on their way
  shard::Buffer master;    // owned range, fp32; amp::Master::Fp32 only
  shard::Buffer residual;  // owned range, int16; amp::Master::Split only
  std::array<shard::Buffer, 2> states;  // owned range
  at::Tensor client_grads;              // owned range, what a client's optimizer reads; only while it runs
  shard::StreamOrder order;             // of all these

 private:
  shard::Buffer make(shard::Quantity what, const at::TensorOptions& options) const;
  void note_updated(Param& param);
  void adopt_changed(const Param& param, const at::Tensor& before, const at::Tensor& now);
  void adopt_tile(shard::Range tile, const at::Tensor& same, const at::Tensor& now);

  Options options_;
  StatePlace state_place_;
  uint32_t master_version() const { return master.is_here() ? master.tensor()._version() : 0; }

  uint32_t known_master_ = 0;  // version after our last write: another one is that of a user who wrote to a view
  GradState grad_state_ = GradState::Empty;
  Turn turn_ = Turn::Waiting;
  bool has_sum_ = false;
  bool grads_visible_ = false, in_grads_ = false;
  LaunchAt launch_at_ = LaunchAt::Complete;
};

}  // namespace tessera::zero

// StateAccess: weights, masters, gradients and optimizer states by parameter: what a rank holds, and whole.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "tessera/shard/named_shard.h"
#include "tessera/zero/backward_driver.h"
#include "tessera/zero/rank_guard.h"

namespace tessera::zero {

using Quantity = shard::Quantity;

// Only parameters with an optimizer group have states: value error for others, but in named_shards() and read_shard().
class StateAccess {
 public:
  StateAccess(Units& units, BackwardDriver& driver);

  int64_t param_step(ParamId param) const;  // updates applied to it (torch's state["step"])
  void set_param_step(ParamId param, int64_t step);
  // Updates since a user last wrote to the weights, where writes are followed (Unit::adopt_beside_residual); for checkpoints.
  std::optional<int64_t> unwritten(ParamId param) const;
  void set_unwritten(ParamId param, std::optional<int64_t> updates);

  // Lists all that this rank holds, by parameter: weights (also those without a group), masters where they are not the weight
  // itself, reduced gradients, optimizer states. Number 0 of every element's replicas taken together are each quantity
  // once. Local. States of a client's own optimizer are the client's: their parts follow local_range().
  std::vector<shard::NamedShard> named_shards() const;
  // Values of a shard, 1-D in the order of its form: a view, in its dtype; a copy for split masters and for what does not live on
  // the device. State error when the shard is no
  // more there. Local.
  at::Tensor read_shard(const shard::NamedShard& shard) { return read_shard(shard, shard.range); }
  at::Tensor read_shard(const shard::NamedShard& shard, shard::Range part);  // elements `part` of its range
  // Between begin_writes() and end_writes(), both collective: elements `range` of the parameter in the order of its memory,
  // which this rank holds, get `values` (1-D, any dtype). Weight: of parameters without a group only; Master stands for the
  // weights of all others, which follow in end_writes(). Local.
  void begin_writes();
  void write(ParamId param, Quantity what, shard::Range range, const at::Tensor& values);
  // Where write() would copy the values: 1-D, in its own dtype. Undefined where write() does more than copy. Local.
  at::Tensor writable_view(ParamId param, Quantity what, shard::Range range) const;
  // Makes State0 or State1 of the parameter what it is before the first update. Between begin_writes() and end_writes(). Local.
  void reset(ParamId param, Quantity what);
  void end_writes();
  // Waits until what was written is where it lives; throws what went wrong on the way. Local.
  void flush();
  // After all masters and states were written an update that did not come to its end no longer matters.
  void check_whole() const { units_.check_whole(); }  // IoError where such an update was the last
  void all_written() { units_.set_broken(""); }
  // Notes that a load did not come to its end.
  void not_written(const std::string& why) { units_.set_broken(why); }
  // This rank's elements of what write() takes for the parameter.
  shard::Range writable(ParamId param, Quantity what) const;
  // This rank's elements of what an optimizer keeps of a trained parameter.
  shard::NamedShard owned_shard(ParamId param) const;
  // Whether the weight that the module computes with is what the optimizer updates.
  bool master_is_weight(ParamId param) const {
    return units_.trained(param, "master_is_weight").unit->master_is_weight();
  }
  // The parameter's shape, and the order of its elements.
  shard::Form form(ParamId param) const;

  // `what` below: Master, Gradient, State0 or State1; value error for Weight, which the parameter itself shows.
  // fp32 in the shape of the parameter, also where that is a slice (ParamSpec::cut) of its whole; collective. Undefined when
  // there is none (no gradient, no such state). IoError on all ranks where the disk of one fails; set_full: set it again.
  at::Tensor get_full(ParamId param, Quantity what);
  void set_full(ParamId param, Quantity what, const at::Tensor& value);
  // `value` was written to the parameter, in a shape of its own or of its whole, and was rounded there: the master gets it as it
  // is; Engine::refresh_params() follows. False, with nothing done, where there is no such master, or the dtypes are the same.
  // Collective.
  bool set_unrounded(ParamId param, const at::Tensor& value);
  // The values that this rank holds: shaped like the parameter where the buffer is replicated, else 1-D; maybe empty. A view, in
  // the buffer's own dtype; a copy for masters that are split (amp/precision.h) and for what does not live on the device.
  at::Tensor local_view(ParamId param, Quantity what);
  // Writes these values, whether or not there is a view. Value error when there is nothing of this kind, or another size. Local,
  // but for masters where parameters are shared: collective then.
  void set_local(ParamId param, Quantity what, const at::Tensor& value);
  // Gives the parameter a gradient of zeros where this engine has none, as another engine has one for the same weight. To be
  // called once all gradients are reduced. Local.
  void complete_gradient(ParamId param);
  // This rank's part of the parameter's flattened elements, [begin, end).
  std::pair<int64_t, int64_t> local_range(ParamId param) const;
  void check_trained(ParamId param, const char* call) const;  // value error for one that is not optimized

  // get_full() for values that the client keeps, such as the states of an optimizer that runs itself. `part`: one value for
  // each element of local_range(), shaped as local_view() is. fp32, shape as of get_full(); collective.
  at::Tensor gather_full(ParamId param, const at::Tensor& part);
  // This rank's part of `full`, shaped as get_full() gives it; shaped as local_view() is, in the dtype of `full`.
  at::Tensor local_part(ParamId param, const at::Tensor& full);
  // The largest of all ranks' values. Collective.
  double agree_max(double value);

 private:
  [[noreturn]] void fail_alone(c10::OutOfMemoryError& error, ParamId param) const;
  void adopt(const Place& place, Quantity what);
  void add_shards(ParamId id, std::vector<shard::NamedShard>& shards) const;
  shard::NamedShard shard_of(ParamId id, Quantity what, shard::Range range, at::ScalarType dtype, bool cut) const;
  at::Tensor read_weight(ParamId param, shard::Range part) const;
  bool is_there(const Place& place, Quantity what) const;
  shard::Range in_owned(const Place& place, shard::Range range) const;
  at::Tensor read_gradient(const Place& place, shard::Range range) const;
  at::Tensor read_owned(const Place& place, Quantity what) const;
  at::Tensor read_owned(const Place& place, Quantity what, shard::Range range) const;
  void set_flat(const Place& place, Quantity what, const at::Tensor& flat);
  void write_owned(const Place& place, Quantity what, const at::Tensor& values, RankGuard& disks);
  at::Tensor gather_flat(const Place& place, const at::Tensor& part);
  at::Tensor local_gradient(const Place& place) const;
  at::Tensor whole_of(const Place& place, const at::Tensor& flat) const;
  at::Tensor flat_of(const Place& place, const at::Tensor& whole, const char* caller) const;

  Units& units_;
  BackwardDriver& driver_;
};

}  // namespace tessera::zero

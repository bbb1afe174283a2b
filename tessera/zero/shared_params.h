// SharedParams: the memory in which all ranks of a shard group have the compute parameters of one engine, and who may write
// to it when.
//
// Note [Phases of shared parameters]
//   Ranks read when they like: in forwards and backwards, in regions, whole parameters anywhere. So they write only in calls
//   that all ranks make, between two moments that no rank passes before all others have come: readers_done(), after which
//   each writes its own slice, and written().
//     construction              the memory is new                           written()
//     update                    the all_gather of summarize(): a rank takes part once its backwards are over, and every way
//                               to an update leads through it (clipping or not, a client's optimizer too; a skipped step
//                               writes nothing)                             written()
//     refresh_params            readers_done()                              written()
//     set_full, set_local       readers_done(), for masters                 written()
//     a region with a writer    edits happen in private copies; at its end readers_done(), slices of them, written()
//     end of the engine         copies out; nobody can write without this rank
//   Hence a forward needs no communication, and ranks may run different numbers of them. What a user writes to whole
//   parameters on their own (stages 1 and 2, p.mul_() between steps) is outside of this: docs/shared_parameters.md.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/shard/layout.h"

namespace tessera::zero {

class SharedParams {
 public:
  // Shares nothing: on() is false, readers_done() and written() do nothing.
  SharedParams() = default;
  // `bytes` for all units together. Collective. Value error where the group cannot share memory, DistBackendError where
  // there is not enough, both on all ranks.
  SharedParams(comm::GroupPtr group, int64_t bytes);

  bool on() const { return arena_.defined(); }
  int64_t bytes() const { return on() ? static_cast<int64_t>(arena_.nbytes()) : 0; }
  // Bytes that take() needs for the flat space of a unit.
  static int64_t bytes_of(const shard::Layout& layout, at::ScalarType dtype);
  // The next unit's space, all zeros; undefined when nothing is shared. All ranks make the same calls.
  at::Tensor take(const shard::Layout& layout, at::ScalarType dtype);

  // The two moments of Note [Phases of shared parameters]. Collective.
  void readers_done(comm::Label why) const;
  void written(comm::Label why) const;

 private:
  comm::GroupPtr group_;
  at::Tensor arena_;
  int64_t taken_ = 0;
};

}  // namespace tessera::zero

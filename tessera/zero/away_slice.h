// AwaySlice: how this rank's slice of a unit's parameters, which lives in host memory or on a disk, comes to its place in a
// gathered space.
//
// Note [Parameters elsewhere]
//   With a home the slice lives in host memory or on a disk, and the parameters are sharded on one rank, too. A gather brings
//   the slice into the bucket, a tile at a time, and goes on from there. A read that fails on one rank is an error of all
//   that take part: they exchange how it went beside the values. What was read ahead is forgotten when the slice is written.
//   On a device all of it is on a stream beside the one that computes, so that a unit comes while the one before it is used.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "tessera/comm/group.h"
#include "tessera/shard/buffer.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/side_stream.h"

namespace tessera::zero {

class AwaySlice {
 public:
  // `order`: of the space that is gathered into; must outlive this object.
  AwaySlice(std::string unit, shard::StreamOrder& order) : unit_(std::move(unit)), order_(order) {}

  // Starts reads of a slice on a disk for the next gather, up to `elements` from its first on. Returns how many are on their way.
  int64_t read_ahead(const shard::Buffer& slice, int64_t elements);
  // Forgets what was read ahead. Writes nothing where nothing was read: an update may run on beside this call.
  void forget_ahead() {
    if (!ahead_.empty()) ahead_.clear();
  }
  // Makes the slice writable: forgets what was read ahead and would be old, and waits for copies from host memory to the device.
  void end_reads();

  // Bring `slice` to its place `range` of `space`, and all ranks' slices to theirs: on the current stream, or beside it. `casts`:
  // `space` has another dtype. Collective.
  comm::Pending gather(comm::Group& group, const shard::Buffer& slice, shard::Range range, const at::Tensor& space,
                       const std::string& label);
  comm::Pending gather_beside(comm::Group& group, const shard::Buffer& slice, shard::Range range,
                              const at::Tensor& space, bool casts, const std::string& label);
  // To be called once the collective is over: the current stream sees what was copied, and tiles may be lent again.
  void arrive(at::Device device);
  // Throws IoError, on all ranks, where a rank's read has failed.
  void check();
  // Takes the place of arrive() and check() where nobody wants the values.
  void drop(at::Device device);
  // Drops what is left of a gather.
  void end_gather();
  // Ends this object's use: copies on their way end on the current stream, without a wait.
  void abandon();
  c10::Event* copied() const { return copied_.get(); }

 private:
  void bring(const shard::Buffer& slice, shard::Range range, const at::Tensor& space);
  void end_copies();

  const std::string unit_;
  shard::StreamOrder& order_;
  std::deque<shard::PendingView> ahead_;  // the slice's first tiles, on their way
  shard::SideStream side_;
  std::shared_ptr<c10::Event> copied_;                                      // to the device
  std::deque<std::pair<at::Tensor, std::shared_ptr<c10::Event>>> copying_;  // tiles and events that end their loans
  at::Tensor words_;                                                        // on the device, where they are cast
  std::string failure_;                                                     // of this rank's last read
  at::Tensor failed_;                                                       // 1 + the rank whose read failed, or 0
  comm::Pending read_check_;
};

}  // namespace tessera::zero

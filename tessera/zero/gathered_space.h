// GatheredSpace: the flat space of a unit while it is gathered: the bucket, what travels into it, and how far that is.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

#include "tessera/comm/group.h"
#include "tessera/shard/buffer.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/side_stream.h"
#include "tessera/zero/away_slice.h"
#include "tessera/zero/shared_space.h"

namespace tessera::zero {

// This rank's slice of the space: its values, wherever they live, and its place among `size` elements.
struct OwnSlice {
  const shard::Buffer& values;
  shard::Range range;
  int64_t size = 0;
};

class GatheredSpace {
 public:
  // The gathered space has elements of `dtype`, on `device`.
  GatheredSpace(const std::string& unit, at::ScalarType dtype, at::Device device)
      : unit_(unit), dtype_(dtype), travels_in_(dtype), device_(device), away_(unit, order_) {}

  // Exactly the elements of the space; undefined where it is not gathered.
  const at::Tensor& bucket() const { return bucket_; }
  // Values travel in `dtype` and are cast back: rounded, except where make_exact() follows.
  void travel_in(at::ScalarType dtype) { travels_in_ = dtype; }
  at::ScalarType travels_in() const { return travels_in_; }
  bool travels_rounded() const { return travels_in_ != dtype_; }
  bool is_rounded() const { return rounded_; }
  AwaySlice& away() { return away_; }

  // Starts a gather of all ranks' slices to `bucket`, by way of `staging` where that is defined. Collective.
  void begin(comm::Group& group, OwnSlice slice, at::Tensor bucket, at::Tensor staging);
  // Gathers shared parameters: the bucket is the space itself, or `bucket` with a copy of it. Local.
  void begin(const SharedSpace& space, const at::Tensor& bucket, at::Tensor staging);
  // Ends a gather: the values are there for the current stream. Throws what has failed on any rank.
  void finish();
  // Replaces rounded values by exact ones, in place. Collective (shared parameters: local).
  void make_exact(comm::Group& group, OwnSlice slice, const SharedSpace& space);
  // Moves shared parameters out of the shared space into `bucket`, with a copy of the values.
  void make_private(const SharedSpace& space, const at::Tensor& bucket);
  // Takes the place of finish() where nobody wants the values: nothing is on its way any more.
  void drop();
  // The current stream uses the bucket, and is to be done with it before the memory is another's.
  void use() { order_.read(device_); }
  void end_use() { order_.write(device_); }
  at::Tensor take_bucket();
  at::Tensor take_staging() { return std::move(staging_); }
  // Ends this object's use: what is in flight ends on the current stream, without a wait. The slice's memory is kept as long.
  void abandon(const shard::Buffer& slice);

 private:
  const std::string unit_;
  const at::ScalarType dtype_;
  at::ScalarType travels_in_;
  const at::Device device_;
  at::Tensor bucket_, staging_;
  bool rounded_ = false;      // the bucket's values were cast on the way
  bool in_staging_ = false;   // the bucket's values are yet to be cast back from staging
  shard::StreamOrder order_;  // of the bucket
  comm::Pending pending_;
  AwaySlice away_;  // where the slice is not here
};

}  // namespace tessera::zero

#include "tessera/zero/gathered_space.h"

#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/dtype.h"

namespace tessera::zero {

void GatheredSpace::begin(comm::Group& group, OwnSlice slice, at::Tensor bucket, at::Tensor staging) {
  order_ = {};
  end_use();
  rounded_ = staging.defined();
  TESSERA_ASSERT(bucket.numel() >= slice.size);
  bucket_ = bucket.numel() == slice.size ? std::move(bucket) : bucket.narrow(0, 0, slice.size);
  const std::string label = "parameters of unit '" + unit_ + "'";
  if (!slice.values.is_here()) {
    pending_ = away_.gather_beside(group, slice.values, slice.range, rounded_ ? staging : bucket_, rounded_, label);
  } else if (rounded_) {
    const at::Tensor mine = staging.narrow(0, slice.range.begin, slice.range.size());
    shard::scaled_copy(mine, slice.values.tensor());
    pending_ = group.all_gather(staging, mine, label);
  } else {
    pending_ = group.all_gather(bucket_, slice.values.tensor(), label);
  }
  in_staging_ = rounded_;
  if (rounded_) staging_ = std::move(staging);
}

void GatheredSpace::begin(const SharedSpace& space, const at::Tensor& bucket, at::Tensor staging) {
  order_ = {};
  end_use();
  rounded_ = staging.defined();
  bucket_ = space.memory();
  if (!bucket.defined()) return;
  bucket_ = bucket.narrow(0, 0, space.memory().numel());
  space.copy_to(bucket_, staging);
  staging_ = std::move(staging);
}

void GatheredSpace::finish() {
  end_use();
  pending_.wait();
  away_.arrive(bucket_.device());
  away_.check();
  if (std::exchange(in_staging_, false)) shard::scaled_copy(bucket_, staging_);
}

void GatheredSpace::make_exact(comm::Group& group, OwnSlice slice, const SharedSpace& space) {
  if (!rounded_) return;
  end_use();
  const std::string label = "exact parameters of unit '" + unit_ + "'";
  if (space.defined()) {
    space.copy_to(bucket_);
  } else if (slice.values.is_here()) {
    group.all_gather(bucket_, slice.values.tensor(), label).wait();
  } else {
    away_.gather(group, slice.values, slice.range, bucket_, label).wait();
    away_.arrive(bucket_.device());
    away_.check();
  }
  rounded_ = false;
}

void GatheredSpace::make_private(const SharedSpace& space, const at::Tensor& bucket) {
  bucket_ = bucket.narrow(0, 0, space.memory().numel());
  space.copy_to(bucket_);
}

void GatheredSpace::drop() {
  end_use();
  pending_.wait();
  in_staging_ = false;
  away_.drop(bucket_.device());
}

at::Tensor GatheredSpace::take_bucket() {
  away_.end_gather();
  return std::exchange(bucket_, at::Tensor());
}

void GatheredSpace::abandon(const shard::Buffer& slice) {
  order_.end(device_);
  pending_.release();
  away_.abandon();
  for (at::Tensor* memory : {&bucket_, &staging_}) {
    order_.keep(*memory, away_.copied());
    memory->reset();
  }
  if (slice.is_here()) order_.keep(slice.tensor(), away_.copied());
}

}  // namespace tessera::zero

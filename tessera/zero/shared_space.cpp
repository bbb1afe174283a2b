#include "tessera/zero/shared_space.h"

#include <ATen/ops/clone.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "tessera/shard/dtype.h"

namespace tessera::zero {

// Rounded values go through the staging buffer a piece at a time.
void SharedSpace::copy_to(const at::Tensor& bucket, const at::Tensor& staging) const {
  if (!staging.defined()) {
    bucket.copy_(memory_);
    return;
  }
  for (int64_t begin = 0; begin < memory_.numel(); begin += staging.numel()) {
    const int64_t n = std::min(staging.numel(), memory_.numel() - begin);
    const at::Tensor piece = staging.narrow(0, 0, n);
    shard::scaled_copy(piece, memory_.narrow(0, begin, n));
    shard::scaled_copy(bucket.narrow(0, begin, n), piece);
  }
}

void SharedSpace::make_copy(int index, const at::Tensor& param, shard::Range range) {
  const c10::InferenceMode no_inference(false);
  copies_[index] = memory_.narrow(0, range.begin, range.size()).clone();
  shard::rebind(param, copies_[index], {0, range.size()});
}

bool SharedSpace::end_copy(int index, at::Tensor& param, shard::Range range, const shard::Form& form) {
  const at::Tensor own = std::exchange(copies_[index], at::Tensor());
  if (shard::is_bound(param, own, {0, range.size()}, form)) {
    shard::rebind(param, memory_, range);
    return true;
  }
  shard::bind(param, memory_, range, form);
  return false;
}

void SharedSpace::reset() {
  memory_.reset();
  copies_.clear();
}

}  // namespace tessera::zero

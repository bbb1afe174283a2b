#include "tessera/zero/bucket_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace tessera::zero {
namespace {

// A small unit that keeps its bucket for a whole pass, such as a model's own parameters, must not keep a layer's.
bool serves(int64_t bucket, int64_t numel) {
  return bucket >= numel && bucket <= 2 * numel;
}

}  // namespace

at::Tensor BucketPool::acquire(int64_t numel, const at::TensorOptions& options) {
  // A bucket made in inference_mode could not be written to outside of it.
  const c10::InferenceMode no_inference(false);
  const auto fit = std::find_if(free_.begin(), free_.end(), [&](const at::Tensor& t) {
    return serves(t.numel(), numel) && t.dtype() == options.dtype();
  });
  at::Tensor bucket;
  if (fit != free_.end()) {
    bucket = *fit;
    free_.erase(fit);
  } else {
    drop_nearly_fitting(numel, options);
    bucket = at::empty({numel}, options);
    bytes_ += static_cast<int64_t>(bucket.nbytes());
    peak_bytes_ = std::max(peak_bytes_, bytes_);
  }
  return bucket.narrow(0, 0, numel);
}

// The one that the new bucket can stand in for.
void BucketPool::drop_nearly_fitting(int64_t numel, const at::TensorOptions& options) {
  const auto found = std::find_if(free_.begin(), free_.end(), [&](const at::Tensor& t) {
    return serves(numel, t.numel()) && t.dtype() == options.dtype();
  });
  if (found == free_.end()) return;
  bytes_ -= static_cast<int64_t>(found->nbytes());
  free_.erase(found);
}

void BucketPool::free_kept() {
  for (const at::Tensor& bucket : free_)
    bytes_ -= static_cast<int64_t>(bucket.nbytes());
  free_.clear();
}

void BucketPool::release(const at::Tensor& bucket) {
  const c10::InferenceMode no_inference(false);
  const auto whole = static_cast<int64_t>(bucket.storage().nbytes() / bucket.element_size());
  free_.push_back(bucket.as_strided({whole}, {1}, 0));
  std::sort(free_.begin(), free_.end(), [](const auto& a, const auto& b) { return a.numel() < b.numel(); });
  if (free_.size() <= max_kept_) return;
  bytes_ -= static_cast<int64_t>(free_.front().nbytes());
  free_.erase(free_.begin());
}

}  // namespace tessera::zero

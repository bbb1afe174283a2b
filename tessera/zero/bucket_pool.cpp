#include "tessera/zero/bucket_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
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
  const auto fit = std::ranges::find_if(free_, [&](const Free& free) {
    return serves(free.bucket.numel(), numel) && free.bucket.dtype() == options.dtype();
  });
  at::Tensor bucket;
  if (fit != free_.end()) {
    fit->order.write(fit->bucket.device());
    if (fit->used) shard::come_after(*fit->used, fit->bucket.device());
    bucket = std::move(fit->bucket);
    free_.erase(fit);
  } else {
    drop_nearly_fitting(numel, options);
    bucket = at::empty({numel}, options);
    bytes_ += static_cast<int64_t>(bucket.nbytes());
    peak_bytes_ = std::max(peak_bytes_, bytes_);
  }
  return bucket.narrow(0, 0, numel);
}

// Drops the free bucket that the new one can stand in for.
void BucketPool::drop_nearly_fitting(int64_t numel, const at::TensorOptions& options) {
  const auto found = std::ranges::find_if(free_, [&](const Free& free) {
    return serves(numel, free.bucket.numel()) && free.bucket.dtype() == options.dtype();
  });
  if (found != free_.end()) drop(found);
}

// Gives a bucket back to the allocator, which knows nothing of an event.
void BucketPool::drop(std::vector<Free>::iterator which) {
  which->order.keep(which->bucket, which->used.get());
  bytes_ -= static_cast<int64_t>(which->bucket.nbytes());
  free_.erase(which);
}

void BucketPool::free_kept() {
  while (!free_.empty())
    drop(free_.begin());
}

void BucketPool::release(const at::Tensor& bucket, std::shared_ptr<c10::Event> used) {
  const c10::InferenceMode no_inference(false);
  const auto whole = static_cast<int64_t>(bucket.storage().nbytes() / bucket.element_size());
  Free free{bucket.as_strided({whole}, {1}, 0), {}, std::move(used)};
  free.order.write(bucket.device());
  const auto larger = [&](const Free& other) { return other.bucket.numel() > whole; };
  free_.insert(std::ranges::find_if(free_, larger), std::move(free));
  if (free_.size() > max_kept_) drop(free_.begin());
}

}  // namespace tessera::zero

// BucketPool: flat buffers that are lent for a while, for gathered parameters and for gradients on their way. The
// largest stay for the next ones, also while smaller ones are lent beside them; small ones are made anew each time.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::zero {

class BucketPool {
 public:
  // Keeps at most `max_kept` free buckets, the largest ones.
  explicit BucketPool(size_t max_kept) : max_kept_(max_kept) {}

  // A 1-D tensor of `numel` elements, contents undefined. Only buckets of the same dtype and at most
  // twice the size are lent again.
  at::Tensor acquire(int64_t numel, const at::TensorOptions& options);
  // Takes back what acquire() gave; nothing may use it any more.
  void release(const at::Tensor& bucket);

  // Those that are not lent go.
  void free_kept();

  // Free and lent.
  int64_t bytes() const { return bytes_; }
  // The most that bytes() ever was.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  void drop_nearly_fitting(int64_t numel, const at::TensorOptions& options);

  size_t max_kept_;
  std::vector<at::Tensor> free_;  // by size
  int64_t bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace tessera::zero

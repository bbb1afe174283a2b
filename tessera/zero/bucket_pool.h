// BucketPool: flat buffers that are lent for a while, for gathered parameters and for gradients on their way. The
// largest stay for the next ones, also while smaller ones are lent beside them; small ones are made anew each time.
// Buckets of a device pass from stream to stream: what the current stream is given after acquire() comes after what it was
// given before release(), whatever stream that was.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/shard/side_stream.h"

namespace tessera::zero {

class BucketPool {
 public:
  // Keeps at most `max_kept` free buckets, the largest ones.
  explicit BucketPool(size_t max_kept) : max_kept_(max_kept) {}
  ~BucketPool() { free_kept(); }
  BucketPool(const BucketPool&) = delete;
  BucketPool& operator=(const BucketPool&) = delete;

  // A 1-D tensor of `numel` elements, contents undefined. Only buckets of the same dtype and at most
  // twice the size are lent again.
  at::Tensor acquire(int64_t numel, const at::TensorOptions& options);
  // Takes back what acquire() gave; nothing may use it any more but work that comes before the event `used`.
  void release(const at::Tensor& bucket, std::shared_ptr<c10::Event> used = nullptr);

  // Frees the buckets that are not lent.
  void free_kept();

  // Bytes of all buckets, free and lent.
  int64_t bytes() const { return bytes_; }
  // The most that bytes() ever was.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  struct Free {
    at::Tensor bucket;
    shard::StreamOrder order;
    std::shared_ptr<c10::Event> used;
  };
  void drop_nearly_fitting(int64_t numel, const at::TensorOptions& options);
  void drop(std::vector<Free>::iterator which);

  size_t max_kept_;
  std::vector<Free> free_;  // by size
  int64_t bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace tessera::zero

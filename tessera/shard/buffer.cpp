#include "tessera/shard/buffer.h"

#include <ATen/ops/zeros.h>

#include "tessera/base/error.h"

namespace tessera::shard {

Buffer::Buffer(int64_t size, const at::TensorOptions& options, HomePtr home)
    : size_(size), options_(options), home_(std::move(home)) {
  if (!home_) tensor_ = at::zeros({size}, options);
}

const at::Tensor& Buffer::tensor() const {
  TORCH_INTERNAL_ASSERT(tensor_.defined(), "a buffer that does not live on the device has no tensor there");
  return tensor_;
}

PendingView Buffer::fetch(Range range) const {
  TESSERA_ASSERT(defined() && range.begin >= 0 && range.begin + range.size() <= size_);
  return home_ ? home_->fetch(range) : PendingView(view(range));
}

void Buffer::store(Range range, const at::Tensor& values) const {
  TESSERA_ASSERT(defined() && values.numel() == range.size());
  if (home_) home_->store(range, values);
}

void Buffer::flush() const {
  if (home_) home_->flush();
}

void Buffer::write(Range range, const at::Tensor& values) const {
  if (home_) {
    store(range, values.to(options_));
  } else {
    view(range).copy_(values);
  }
}

}  // namespace tessera::shard

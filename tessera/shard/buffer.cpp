#include "tessera/shard/buffer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/side_stream.h"

namespace tessera::shard {

const at::Tensor& PendingView::wait() {
  for (const auto& event : std::exchange(events_, {}))
    if (!event->query()) event->synchronize();
  if (arrive_) std::exchange(arrive_, {})();
  return values_;
}

const at::Tensor& PendingView::wait_on(c10::Device device) {
  // A copy from memory that is not page-locked may begin before its stream is there.
  if (!events_.empty() && values_.defined() && !values_.is_pinned()) return wait();
  for (const auto& event : std::exchange(events_, {}))
    come_after(*event, device);
  return wait();
}

std::vector<Range> tiles_of(Range range) {
  std::vector<Range> tiles;
  for (int64_t begin = range.begin; begin < range.end; begin = tiles.back().end)
    tiles.push_back({begin, std::min((begin / kTile + 1) * kTile, range.end)});
  return tiles;
}

Buffer::Buffer(int64_t size, const at::TensorOptions& options, HomePtr home)
    : size_(size), options_(options), home_(std::move(home)) {
  if (!home_) tensor_ = at::zeros({size}, options);
}

Buffer::Buffer(const at::Tensor& values) : size_(values.numel()), options_(values.options()), tensor_(values) {}

Buffer Buffer::without_memory(int64_t size, const at::TensorOptions& options) {
  Buffer buffer;
  buffer.size_ = size;
  buffer.options_ = options;
  return buffer;
}

void Buffer::make() {
  TESSERA_ASSERT(defined());
  // A tensor made in inference_mode could not be written to outside of it.
  const c10::InferenceMode no_inference(false);
  if (!has_memory()) tensor_ = at::empty({size_}, options_);
}

const at::Tensor& Buffer::tensor() const {
  TORCH_INTERNAL_ASSERT(tensor_.defined(), "a buffer without memory on the device has no tensor there");
  return tensor_;
}

PendingView Buffer::fetch(Range range) const {
  TESSERA_ASSERT(defined() && range.begin >= 0 && range.begin + range.size() <= size_);
  if (home_) return home_->fetch(range);
  return PendingView(range == Range{0, size_} ? tensor() : view(range));
}

void Buffer::store(Range range, const at::Tensor& values) const {
  TESSERA_ASSERT(defined() && values.numel() == range.size());
  if (home_) home_->store(range, values);
}

bool Home::arrives(Range, const std::shared_ptr<c10::Event>&) {
  return false;
}

bool Buffer::arrives(Range range, const std::shared_ptr<c10::Event>& event) const {
  TESSERA_ASSERT(home_ != nullptr);
  return home_->arrives(range, event);
}

void Buffer::flush() const {
  if (home_) home_->flush();
}

at::Tensor Buffer::read(Range range) const {
  if (!home_) return view(range);
  at::Tensor values = at::empty({range.size()}, options_);
  for (const Range tile : tiles_of(range))
    values.narrow(0, tile.begin - range.begin, tile.size()).copy_(fetch(tile).wait());
  return values;
}

void Buffer::write(Range range, const at::Tensor& values) const {
  if (!home_) {
    view(range).copy_(values);
    return;
  }
  for (const Range tile : tiles_of(range))
    store(tile, values.narrow(0, tile.begin - range.begin, tile.size()).to(dtype()));
}

void Buffer::fill(Range range, double value) const {
  if (!home_) {
    view(range).fill_(value);
    return;
  }
  for (const Range tile : tiles_of(range))
    store(tile, at::full({tile.size()}, value, options_.device(at::kCPU)));
}

void Buffer::send_to(HomePtr home) {
  if (!has_memory() || home_ || !home) return;
  for (const Range tile : tiles_of({0, size_}))
    home->store(tile, view(tile));
  home->flush();
  tensor_.reset();
  home_ = std::move(home);
  sent_ = true;
}

void Buffer::bring_back() {
  if (!sent_) return;
  tensor_ = read({0, size_});
  home_.reset();
  sent_ = false;
}

}  // namespace tessera::shard

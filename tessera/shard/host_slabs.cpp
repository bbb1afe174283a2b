#include "tessera/shard/host_slabs.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "tessera/shard/part.h"

namespace tessera::shard {

namespace {

constexpr int64_t kFirst = int64_t{1} << 25;  // bytes of the first slab, at least
constexpr int64_t kPart = 8;  // a later one is no more than this part of what was taken before, unless more is expected

at::Tensor page_locked(int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
}

int64_t largest_power(int64_t bytes) {
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
}

int64_t next_power(int64_t bytes) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
}

// The first byte from `used` on where a piece may begin.
int64_t aligned(const at::Tensor& memory, int64_t used) {
  const auto over = static_cast<int64_t>((reinterpret_cast<uintptr_t>(memory.const_data_ptr()) + used) %
                                         static_cast<uintptr_t>(HostSlabs::kAlignment));
  return over == 0 ? used : used + HostSlabs::kAlignment - over;
}

}  // namespace

void HostSlabs::expect(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  expected_ = bytes;
}

at::Tensor HostSlabs::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto fits = [&](const Slab& slab) { return aligned(slab.memory, slab.used) + bytes <= slab.memory.numel(); };
  auto slab = std::ranges::find_if(slabs_, fits);
  if (slab == slabs_.end()) {
    const int64_t many = largest_power(std::max({expected_, slabs_.empty() ? kFirst : taken_ / kPart, int64_t{1}}));
    const int64_t size = std::max(next_power(bytes), many);
    at::Tensor memory = page_locked(size);
    if (aligned(memory, 0) + bytes > size) memory = page_locked(size + kAlignment);
    slab = slabs_.insert(slabs_.end(), {std::move(memory), 0});
  }
  const int64_t begin = aligned(slab->memory, slab->used);
  slab->used = begin + bytes;
  taken_ += bytes;
  expected_ = std::max<int64_t>(0, expected_ - bytes);
  return part_of(slab->memory, {begin, begin + bytes}).zero_();  // writes to others are not writes to it
}

std::vector<at::Tensor> HostSlabs::take_pieces(int64_t bytes, int64_t step) {
  std::vector<at::Tensor> pieces;
  for (; bytes >= step; bytes -= pieces.back().numel())
    pieces.push_back(page_locked(largest_power(bytes)).zero_());
  if (bytes > 0) pieces.push_back(take(bytes));
  return pieces;
}

void return_host_memory(c10::DeviceType type) noexcept try {
  if (auto* const allocator = at::getHostAllocator(type)) allocator->empty_cache();
} catch (const std::exception&) {
  // A device that has no such allocator, or fails.
}

}  // namespace tessera::shard

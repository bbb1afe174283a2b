#include "tessera/offload/staging.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::offload {

namespace {

std::shared_ptr<char> ordinary_bytes(int64_t bytes) {
  return {io::aligned_bytes(bytes).release(), io::AlignedFree()};
}

}  // namespace

Staging::Staging(int64_t count, int64_t bytes, MemoryMaker make)
    : bytes_(bytes), make_(make ? std::move(make) : &ordinary_bytes) {
  keep(count);
}

void Staging::keep(int64_t count) {
  const std::lock_guard lock(mutex_);
  count_ = std::max(count_, count);
  free_.reserve(static_cast<size_t>(count_));  // giving back must not fail
}

std::shared_ptr<char> Staging::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Block block = free_or_new(bytes);
  char* const memory = block.memory.get();
  taken_.insert({memory, std::move(block)});
  return {memory, [self = shared_from_this()](char* given) { self->return_buffer(given); }};
}

Staging::Block Staging::free_or_new(int64_t bytes) {
  if (bytes <= bytes_ && !free_.empty()) {
    Block block = std::move(free_.back());  // the block that was used last: the others may never be needed
    free_.pop_back();
    return block;
  }
  const bool kept = bytes <= bytes_ && kept_ < count_;
  const int64_t size = kept ? bytes_ : bytes;
  Block block{make_(size), size, kept};
  if (kept) ++kept_;
  now_bytes_ += size;
  peak_bytes_ = std::max(peak_bytes_, now_bytes_);
  return block;
}

bool Staging::has_room(int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return bytes > bytes_ || !free_.empty() || kept_ < count_;
}

bool Staging::holds(const char* memory, int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto after = taken_.upper_bound(memory);
  if (after == taken_.begin()) return false;
  const auto& [begin, block] = *std::prev(after);
  return memory + bytes <= begin + block.bytes;
}

void Staging::return_buffer(char* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = taken_.find(memory);
  Block block = std::move(found->second);
  taken_.erase(found);
  if (block.kept) {
    free_.push_back(std::move(block));
  } else {
    now_bytes_ -= block.bytes;
  }
}

int64_t Staging::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_bytes_;
}

}  // namespace tessera::offload

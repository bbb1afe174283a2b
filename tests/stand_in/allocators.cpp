#include "tests/stand_in/allocators.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/stand_in/clocks.h"
#include "tests/stand_in/memory.h"
#include "tests/stand_in/stand_in.h"

namespace tessera::stand_in {
namespace {

constexpr size_t kAlignment = 64, kPage = 4096;
constexpr size_t kKept = 64;  // blocks of a size and stream that wait for who asks again

size_t rounded(size_t bytes, size_t to = kAlignment) {
  return (bytes + to - 1) / to * to;
}

void* allocate_host(size_t bytes, size_t alignment = kAlignment) {
  void* host = std::aligned_alloc(alignment, rounded(bytes, alignment));
  TORCH_CHECK_WITH(OutOfMemoryError, host != nullptr, "[stand_in] no memory for ", bytes, " bytes");
  return host;
}

struct Block {
  void* host;
  size_t bytes;
  c10::DeviceIndex device;
  Stream stream;              // that asked for it, and has it again when it is released
  std::vector<Stream> users;  // of record_stream()
};

// As CUDA's: what a stream releases it may have again at once. Keeps the statistics that torch.accelerator tells.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = static_cast<c10::DeviceIndex>(current_device());
    const c10::Device there(c10::kPrivateUse1, device);
    if (bytes == 0) return {nullptr, there};
    auto* block = new Block{nullptr, bytes, device, current_stream(device), {}};
    {
      const std::lock_guard lock(mutex_);
      count(device, bytes);
      settle(block->stream);
      block->host = take(block->stream, rounded(bytes));
    }
    lend(bytes_at(block->host, bytes), block->stream);
    std::memset(block->host, 0xff, bytes);  // NaN: who reads what nobody wrote shall see it
    return {to_device(block->host, device), block, &release, there};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, size_t count) const override {
    give(current_stream(device_of(dst)), "copying memory",
         {{bytes_at(src, count), false, ""}, {bytes_at(dst, count), true, ""}});
    std::memcpy(to_host(dst), to_host(src), count);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &release || data.get_context() == nullptr) return;
    const std::lock_guard lock(mutex_);
    auto& users = static_cast<Block*>(data.get_context())->users;
    users.push_back(static_cast<Stream>(stream.device_index() * kStreams + stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = bytes_.at(device);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    bytes_.at(device).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    bytes_.at(device).reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    return {static_cast<size_t>(capacity_ - bytes_.at(device).current), static_cast<size_t>(capacity_)};
  }

  void set_capacity(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    capacity_ = bytes;
  }
  void fail_at(int device, int64_t number) {
    const std::lock_guard lock(mutex_);
    fails_at_.at(static_cast<size_t>(device)) = number;
  }
  int64_t bytes_in_use() {
    const std::lock_guard lock(mutex_);
    int64_t sum = 0;
    for (const auto& stat : bytes_)
      sum += stat.current;
    return sum;
  }
  void settle_all() {
    const std::lock_guard lock(mutex_);
    for (auto& [stream, blocks] : released_)
      settle(stream);
  }

 private:
  void count(c10::DeviceIndex device, size_t bytes) {
    c10::CachingAllocator::Stat& stat = bytes_.at(device);
    const bool fails = fails_at_.at(device) == 0;
    if (fails_at_.at(device) >= 0) --fails_at_.at(device);
    TORCH_CHECK_WITH(OutOfMemoryError, !fails && stat.current + static_cast<int64_t>(bytes) <= capacity_,
                     "[stand_in] device ", static_cast<int>(device), " has no room for ", bytes, " bytes");
    stat.increase(bytes);
  }
  // What the stream released is its own from here on. What other streams were recorded for goes to the system, since it is
  // free only once they are through.
  void settle(Stream stream) {
    for (const Block& block : std::exchange(released_[stream], {})) {
      const Bytes bytes = bytes_at(block.host, rounded(block.bytes));  // of all who had it
      check_released(bytes, stream, block.users);
      std::vector<void*>& there = free_[{stream, rounded(block.bytes)}];
      if (block.users.empty() && there.size() < kKept) {
        there.push_back(block.host);
      } else {
        forget(bytes);
        std::free(block.host);
      }
    }
  }
  void* take(Stream stream, size_t bytes) {
    std::vector<void*>& there = free_[{stream, bytes}];
    if (there.empty()) return allocate_host(bytes);
    void* host = there.back();
    there.pop_back();
    return host;
  }
  static void release(void* context);

  std::mutex mutex_;
  int64_t capacity_ = int64_t{1} << 40;  // of each device
  std::array<int64_t, kDevices> fails_at_ = [] {
    std::array<int64_t, kDevices> none{};
    none.fill(-1);
    return none;
  }();
  std::array<c10::CachingAllocator::Stat, kDevices> bytes_;
  std::map<Stream, std::vector<Block>> released_;  // since the stream asked last
  std::map<std::pair<Stream, size_t>, std::vector<void*>> free_;
};

// Ordinary host memory, but remembered. As CUDA's: of the next power of two, released once copies that use it are done, and
// kept for who asks again until the cache is emptied.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    const std::lock_guard lock(mutex_);
    const size_t whole = std::bit_ceil(bytes);
    std::vector<void*>& there = kept_[whole];
    void* host = nullptr;
    if (there.empty()) {
      host = allocate_host(whole, kPage);
      taken_ += whole;
    } else {
      host = there.back();
      there.pop_back();
    }
    blocks_[reinterpret_cast<uintptr_t>(host)] = bytes;
    return {host, host, &release, c10::kCPU};
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // late copies are known
  void empty_cache() override {
    const std::lock_guard lock(mutex_);
    for (const auto& [bytes, blocks] : std::exchange(kept_, {})) {
      taken_ -= bytes * blocks.size();
      std::ranges::for_each(blocks, std::free);
    }
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, size_t count) const override { default_copy_data(dst, src, count); }

  // Lent and kept.
  int64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(taken_);
  }
  bool owns(const void* p) const {
    const auto address = reinterpret_cast<uintptr_t>(p);
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(address);
    return after != blocks_.begin() && address - std::prev(after)->first < std::prev(after)->second;
  }

 private:
  static void release(void* host);
  mutable std::mutex mutex_;
  std::map<uintptr_t, size_t> blocks_;         // lent
  std::map<size_t, std::vector<void*>> kept_;  // by size
  size_t taken_ = 0;
};

// Never destroyed, because tensors may outlive static objects.
Allocator& devices() {
  static auto* allocator = new Allocator;
  return *allocator;
}
PinnedAllocator& pinned() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void Allocator::release(void* context) {
  auto* block = static_cast<Block*>(context);
  Allocator& self = devices();
  {
    const std::lock_guard lock(self.mutex_);
    self.bytes_.at(block->device).decrease(block->bytes);
    self.released_[block->stream].push_back(std::move(*block));
  }
  delete block;
}

void PinnedAllocator::release(void* host) {
  PinnedAllocator& self = pinned();
  size_t bytes = 0;
  {
    const std::lock_guard lock(self.mutex_);
    bytes = self.blocks_.extract(reinterpret_cast<uintptr_t>(host)).mapped();
  }
  forget(bytes_at(host, bytes));
  const std::lock_guard lock(self.mutex_);
  self.kept_[std::bit_ceil(bytes)].push_back(host);
}

}  // namespace

c10::DeviceAllocator& device_allocator() {
  return devices();
}
at::HostAllocator& pinned_allocator() {
  return pinned();
}
bool is_pinned(const void* p) {
  return pinned().owns(p);
}
void check_all_released() {
  devices().settle_all();
}

}  // namespace tessera::stand_in

int64_t tessera_stand_in_bytes() {
  return tessera::stand_in::devices().bytes_in_use();
}

void tessera_stand_in_set_capacity(int64_t bytes) {
  tessera::stand_in::devices().set_capacity(bytes);
}

int64_t tessera_stand_in_pinned_bytes() {
  return tessera::stand_in::pinned().bytes();
}

void tessera_stand_in_fail_allocation(int device, int64_t number) {
  tessera::stand_in::devices().fail_at(device, number);
}

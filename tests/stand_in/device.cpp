// The device as torch sees it: memory, current device, stream and events. Note [Stand-in accelerator], stand_in.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "tests/stand_in/memory.h"
#include "tests/stand_in/stand_in.h"

namespace tessera::stand_in {
namespace {

constexpr size_t kAlignment = 64;
thread_local c10::DeviceIndex current = 0;
// Which stream of each device is the thread's current one.
constexpr c10::StreamId kComputes = 0, kCopies = 1;
thread_local std::array<c10::StreamId, kDevices> current_stream{};

c10::Device current_torch_device() {
  return {c10::kPrivateUse1, current};
}

// With the current index for a device without one.
c10::Device checked(c10::Device device) {
  TORCH_CHECK(device.type() == c10::kPrivateUse1 && device.index() < kDevices, "[stand_in] there is no device ",
              device);
  return device.has_index() ? device : current_torch_device();
}

// ---- memory. Torch knows one allocator and one set of pinned memory a process, so these are its state.
void* allocate_host(size_t bytes) {
  void* host = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  TORCH_CHECK_WITH(OutOfMemoryError, host != nullptr, "[stand_in] no memory for ", bytes, " bytes");
  return host;
}

// Keeps the statistics that torch.accelerator tells.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, current_torch_device()};
    count(current, bytes);
    auto* block = new Block{allocate_host(bytes), bytes, current};
    std::memset(block->host, 0xff, bytes);  // NaN: who reads what nobody wrote shall see it
    return {to_device(block->host, current), block, &release, current_torch_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, size_t count) const override {
    std::memcpy(to_host(dst), to_host(src), count);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
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
  int64_t bytes_in_use() {
    const std::lock_guard lock(mutex_);
    int64_t sum = 0;
    for (const auto& stat : bytes_)
      sum += stat.current;
    return sum;
  }

 private:
  struct Block {
    void* host;
    size_t bytes;
    c10::DeviceIndex device;
  };
  void count(c10::DeviceIndex device, size_t bytes) {
    const std::lock_guard lock(mutex_);
    c10::CachingAllocator::Stat& stat = bytes_.at(device);
    TORCH_CHECK_WITH(OutOfMemoryError, stat.current + static_cast<int64_t>(bytes) <= capacity_, "[stand_in] device ",
                     static_cast<int>(device), " has no room for ", bytes, " bytes");
    stat.increase(bytes);
  }
  static void release(void* context);

  std::mutex mutex_;
  int64_t capacity_ = int64_t{1} << 40;  // of each device
  std::array<c10::CachingAllocator::Stat, kDevices> bytes_;
};

// Host memory that torch calls pinned: ordinary, but remembered.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    void* host = allocate_host(bytes);
    const std::lock_guard lock(mutex_);
    blocks_[reinterpret_cast<uintptr_t>(host)] = bytes;
    return {host, host, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, size_t count) const override { default_copy_data(dst, src, count); }

  bool owns(const void* p) const {
    const auto address = reinterpret_cast<uintptr_t>(p);
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(address);
    return after != blocks_.begin() && address - std::prev(after)->first < std::prev(after)->second;
  }

 private:
  static void release(void* host);
  mutable std::mutex mutex_;
  std::map<uintptr_t, size_t> blocks_;
};

// Never destroyed, because tensors may outlive static objects.
Allocator& device_allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}
PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void Allocator::release(void* context) {
  auto* block = static_cast<Block*>(context);
  Allocator& self = device_allocator();
  {
    const std::lock_guard lock(self.mutex_);
    self.bytes_.at(block->device).decrease(block->bytes);
  }
  std::free(block->host);
  delete block;
}

void PinnedAllocator::release(void* host) {
  PinnedAllocator& self = pinned_allocator();
  {
    const std::lock_guard lock(self.mutex_);
    self.blocks_.erase(reinterpret_cast<uintptr_t>(host));
  }
  std::free(host);
}

// ---- streams. What was put on a device's stream for copies, and how much of it is done.
class Copies {
 public:
  void add(std::function<void()> copy) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(copy));
  }
  int64_t put() {
    const std::lock_guard lock(mutex_);
    return done_ + static_cast<int64_t>(waiting_.size());
  }
  bool is_done(int64_t number) {
    const std::lock_guard lock(mutex_);
    return done_ >= number;
  }
  void run(int64_t number) {
    const std::lock_guard lock(mutex_);
    const at::NoGradGuard no_grad;
    for (; done_ < number; ++done_) {
      const auto copy = std::move(waiting_.front());
      waiting_.pop_front();
      copy();
    }
  }

 private:
  std::recursive_mutex mutex_;
  std::deque<std::function<void()>> waiting_;
  int64_t done_ = 0;
};

std::array<Copies, kDevices>& copies() {
  static auto* all = new std::array<Copies, kDevices>;
  return *all;
}

struct Event {
  c10::DeviceIndex device;
  int64_t number;  // of copies before it; 0: on the stream that computes, whose work is done
};

// ---- the current device and its streams.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return current_torch_device(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kPrivateUse1, std::exchange(current, checked(device).index())};
  }
  void setDevice(c10::Device device) const override { current = checked(device).index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }

  static c10::Stream stream_of(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, checked(device), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current_stream.at(checked(device).index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, kComputes); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream_of(device, kCopies); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(device, kCopies); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device(), std::exchange(current_stream.at(stream.device().index()), stream.id()));
  }
  void* getStreamNativeHandle(c10::Stream stream) const override {
    return stream.id() == kComputes ? stream_handle(checked(stream.device()).index()) : nullptr;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Copies& copies_of = copies().at(stream.device().index());
    return stream.id() == kComputes || copies_of.is_done(copies_of.put());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (stream.id() == kCopies) synchronizeDevice(stream.device().index());
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Copies& copies_of = copies().at(device);
    copies_of.run(copies_of.put());
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const c10::DeviceIndex device = checked(stream.device()).index();
    if (*event == nullptr) *event = new Event{};
    *static_cast<Event*>(*event) = {device, stream.id() == kCopies ? copies().at(device).put() : 0};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (stream.id() == kComputes) synchronizeEvent(event);
  }
  bool queryEvent(void* event) const override {
    const auto* of = static_cast<Event*>(event);
    return copies().at(of->device).is_done(of->number);
  }
  void synchronizeEvent(void* event) const override {
    const auto* of = static_cast<Event*>(event);
    copies().at(of->device).run(of->number);
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current, checked({c10::kPrivateUse1, index}).index());
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }

  // Strict as CUDA's: from_blob asks it, and must not take host memory for the device's.
  at::Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(on_device(p), "[stand_in] the pointer is not the device's");
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device_of(p))};
  }
  bool isPinnedPtr(const void* p) const override { return pinned_allocator().owns(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    TORCH_CHECK(storage.resizable(), "[stand_in] this memory cannot be resized");
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = storage.allocator()->allocate(bytes);
    const size_t kept = std::min(storage.nbytes(), bytes);
    if (kept > 0 && storage.data() != nullptr) std::memcpy(to_host(data.get()), to_host(storage.data()), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
[[maybe_unused]] const bool registered = [] {
  c10::register_privateuse1_backend("privateuseone");  // its own name: torch then takes it for the accelerator
  c10::SetAllocator(c10::kPrivateUse1, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

int current_device() {
  return current;
}

void copy_on_current_stream(int device, bool blocks, std::function<void()> copy) {
  if (current_stream.at(device) == kComputes) return copy();
  Copies& there = copies().at(device);
  there.add(std::move(copy));
  if (blocks) there.run(there.put());
}

}  // namespace tessera::stand_in

int64_t tessera_stand_in_bytes() {
  return tessera::stand_in::device_allocator().bytes_in_use();
}

void tessera_stand_in_set_capacity(int64_t bytes) {
  tessera::stand_in::device_allocator().set_capacity(bytes);
}

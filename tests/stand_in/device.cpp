// The device as torch sees it: the current device, streams and events. Note [Stand-in accelerator], stand_in.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "tests/stand_in/allocators.h"
#include "tests/stand_in/late_copies.h"
#include "tests/stand_in/memory.h"

namespace tessera::stand_in {
namespace {

thread_local c10::DeviceIndex current = 0;
// Which stream of each device is the thread's current one.
thread_local std::array<c10::StreamId, kDevices> current_streams{};

c10::Device current_torch_device() {
  return {c10::kPrivateUse1, current};
}

// With the current index for a device without one.
c10::Device checked(c10::Device device) {
  TORCH_CHECK(device.type() == c10::kPrivateUse1 && device.index() < kDevices, "[stand_in] there is no device ",
              device);
  return device.has_index() ? device : current_torch_device();
}

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
  static Stream number_of(const c10::Stream& stream) {
    TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreams, "[stand_in] there is no stream ", stream.id());
    return static_cast<Stream>(checked(stream.device()).index() * kStreams + stream.id());
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current_streams.at(checked(device).index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::array<std::atomic<int64_t>, kDevices> taken{};
    return stream_of(device, 1 + taken.at(checked(device).index())++ % (kStreams - 1));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device(), std::exchange(current_streams.at(stream.device().index()), stream.id()));
  }
  void* getStreamNativeHandle(c10::Stream stream) const override { return stream_handle(number_of(stream)); }
  bool queryStream(const c10::Stream& stream) const override { return is_over(clock_of(number_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_works();
    notice_wait();
    host_waits_for(number_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    check_works();
    notice_wait();
    for (int number = 0; number < kStreams; ++number)
      host_waits_for(device * kStreams + number);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

  // An event is a clock; null: never recorded.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    check_works();
    if (*event == nullptr) *event = new Clock;
    *static_cast<Clock*>(*event) = clock_of(number_of(stream));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    check_works();
    if (event != nullptr) order(number_of(stream), *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_over(*static_cast<Clock*>(event)); }
  void synchronizeEvent(void* event) const override {
    check_works();
    notice_wait();
    if (event != nullptr) host_waits_for(*static_cast<Clock*>(event));
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }

  // Who asks and hears yes knows it from then on.
  static bool is_over(const Clock& clock) {
    if (are_late_copies_before(clock)) return false;
    host_waits_for(clock);
    return true;
  }
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
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
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
    if (kept > 0 && storage.data() != nullptr) device_allocator().copy_data(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
[[maybe_unused]] const bool registered = [] {
  c10::register_privateuse1_backend("privateuseone");  // its own name: torch then takes it for the accelerator
  c10::SetAllocator(c10::kPrivateUse1, &device_allocator());
  at::setHostAllocator(c10::kPrivateUse1, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

int current_device() {
  return current;
}

Stream current_stream(int device) {
  return static_cast<Stream>(device * kStreams + current_streams.at(device));
}

}  // namespace tessera::stand_in

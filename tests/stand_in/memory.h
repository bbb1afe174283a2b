// Devices of the stand-in accelerator: addresses, streams, and which one is current.
//
// Note [Device addresses]
//   The address of the host memory behind it, with one bit set and the device's index above the 48 bits of a host
//   address. Nothing is mapped there, so that a host that reads it is stopped at once; offsets, views and interior
//   pointers work, since no table of addresses is kept. Bit 55 lies above what user space gets (without asking for
//   more) and below the top byte, which ARM ignores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace tessera::stand_in {

constexpr int kDevices = 4;
constexpr int kAddressBits = 48;
constexpr uintptr_t kAddress = (uintptr_t{1} << kAddressBits) - 1;
constexpr uintptr_t kDeviceBit = uintptr_t{1} << 55;
static_assert(uintptr_t{kDevices} << kAddressBits <= kDeviceBit);

int current_device();  // of the calling thread; within the library only

// `copy`, on a device's stream for copies (where it is the current one of the thread): now, or, unless it blocks, when somebody
// waits for it. See device.cpp.
void copy_on_current_stream(int device, bool blocks, std::function<void()> copy);

// The stream of a device that computes, as kernels take it. Not an address.
inline void* stream_handle(int device) {
  return reinterpret_cast<void*>(uintptr_t{0x7e55e2a0} + static_cast<uintptr_t>(device));
}

inline bool on_device(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & kDeviceBit) != 0;
}
inline int device_of(const void* p) {
  return static_cast<int>((reinterpret_cast<uintptr_t>(p) & ~kDeviceBit) >> kAddressBits);
}

inline void* to_device(void* host, int device) {
  const uintptr_t index = static_cast<uintptr_t>(device) << kAddressBits;
  return host == nullptr ? nullptr : reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | index | kDeviceBit);
}

// Null stays null. std::runtime_error for a host pointer.
template <class T>
T* to_host(T* p) {
  if (p == nullptr) return nullptr;
  if (!on_device(p)) throw std::runtime_error("[stand_in] a host pointer where the device's was expected");
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) & kAddress);
}

}  // namespace tessera::stand_in

// Devices of the stand-in accelerator: addresses, and which one is current.
//
// Note [Device addresses]
//   The address of the host memory behind it, with one bit set and the device's index above the 48 bits of a host
//   address. Nothing is mapped there, so that a host that reads it is stopped at once; offsets, views and interior
//   pointers work, since no table of addresses is kept. Bit 55 lies above what user space gets (without asking for
//   more) and below the top byte, which ARM ignores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tessera::stand_in {

constexpr int kDevices = 4;
constexpr int kAddressBits = 48;
constexpr uintptr_t kAddress = (uintptr_t{1} << kAddressBits) - 1;
constexpr uintptr_t kDeviceBit = uintptr_t{1} << 55;
static_assert(uintptr_t{kDevices} << kAddressBits <= kDeviceBit);

int current_device();  // of the calling thread; within the library only

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

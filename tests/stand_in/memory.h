// Device addresses of the stand-in accelerator, and the stream's handle.
//
// Note [Device addresses]
//   The address of the host memory behind it with one bit set. Nothing is mapped there, so that a host that reads it is
//   stopped at once; offsets, views and interior pointers work, since no table of addresses is kept. Bit 55 lies above
//   what user space gets (47 bits, on large machines 56 only on request) and below the top byte, which ARM ignores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tessera::stand_in {

constexpr uintptr_t kDeviceBit = uintptr_t{1} << 55;
constexpr uintptr_t kStreamHandle = 0x7e55e2a;  // of the only stream; not an address

inline bool on_device(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & kDeviceBit) != 0;
}

inline void* to_device(void* host) {
  return host == nullptr ? nullptr : reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | kDeviceBit);
}

// Null stays null. std::runtime_error for a host pointer and for one that is not aligned to `align` bytes.
template <class T>
T* to_host(T* device, size_t align = 1) {
  if (device == nullptr) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(device);
  if (!on_device(device)) throw std::runtime_error("[stand_in] a host pointer where the device's was expected");
  if (address % align != 0) {
    throw std::runtime_error("[stand_in] a pointer is not aligned to " + std::to_string(align) + " bytes");
  }
  return reinterpret_cast<T*>(address & ~kDeviceBit);
}

}  // namespace tessera::stand_in

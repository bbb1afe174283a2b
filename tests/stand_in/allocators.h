// Memory of the devices, and host memory that torch calls page-locked. Torch knows one allocator of each a process.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace tessera::stand_in {

c10::DeviceAllocator& device_allocator();
at::HostAllocator& pinned_allocator();
bool is_pinned(const void* p);
void check_all_released();  // as if every stream asked for memory now

}  // namespace tessera::stand_in

// Where the kernels of tensors that are not on the CPU come from: see Note [Device kernels] in kernels/device_table.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/kernels/device_table.h"

namespace tessera::shard {

// Loads what is needed, once a process. Not-implemented error for a type without a library of kernels, with one made for
// another version, or without a device that can be used.
const kernels::DeviceTable& device_kernels(c10::DeviceType type);
// Throws the same error for a device that models cannot be on; the CPU passes.
void check_device(c10::Device device);
// Whether work given to the current stream of `device` is recorded into a graph, for replays, and not done now.
bool is_captured(c10::Device device);

// Calls f(table, stream) with `device` as the current one and the stream that torch's operators would use now.
template <class F>
void on_device(c10::Device device, const F& f) {
  const kernels::DeviceTable& table = device_kernels(device.type());
  const c10::DeviceGuard guard(device);
  f(table, c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

}  // namespace tessera::shard

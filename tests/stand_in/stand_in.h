// Note [Stand-in accelerator]
//   libtessera_privateuseone.so makes torch's spare device type, "privateuseone", a device: one device in the host's
//   memory whose addresses the host cannot read (memory.h). So the path of tensors that are not the CPU's is tested where
//   no accelerator is, and host code that touches device memory crashes there too. Loading the library registers it:
//   link it, or in Python torch.ops.load_library(path).
//   Operators run on the CPU: at::native::cpu_fallback copies arguments to the host and results back, so the bits are the
//   CPU's. Random numbers are drawn from the CPU's generator. There is one stream, on which all work is done at once.
//   It is also the device's library of kernels, tessera_device_table() of kernels/device_table.h; they run the reference,
//   refuse host pointers and any stream but the device's, and are counted.
#pragma once

#include <cstdint>

#include "tessera/kernels/device_table.h"

#pragma GCC visibility push(default)
extern "C" {
const tessera::kernels::DeviceTable* tessera_device_table();

int64_t tessera_stand_in_launches();                      // kernels of the table so far, empty ranges included
int64_t tessera_stand_in_launches_of(const char* entry);  // of one entry, "adam"; -1: no such entry
void tessera_stand_in_fail_next_launch();                 // the next kernel throws std::runtime_error instead
int64_t tessera_stand_in_bytes();                         // device memory in use
}
#pragma GCC visibility pop

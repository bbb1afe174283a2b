// DeviceBackend: what carries tensors of a device between ranks that a C++ program starts, as the core finds it at run time.
//
// Note [Back ends of devices]
//   In Python torch's process groups have a back end for each type of device. Where a C++ program makes groups of the environment
//   (backends.h), that of device type T is in a library of its own, libtessera_T_comm.so (T as torch writes it in lower case; for
//   CUDA it is NCCL), which exports tessera_device_backend(). The first group of a process with such a device has the core load
//   it; without it tensors of the device go over Gloo, by way of host memory. A library that was compiled for another version of
//   this header is refused by its number.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace tessera::comm {

constexpr int kDeviceBackendVersion = 1;

struct DeviceBackend {
  int version;  // kDeviceBackendVersion
  // The device's name, the same in all processes that see this device, and no other device's; empty: not known.
  std::string (*identity)(c10::Device device);
  // Makes the back end of `size` ranks that use `store`. `timeout`: longest wait for a rank.
  c10::intrusive_ptr<c10d::Backend> (*make)(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout);
};
using TesseraDeviceBackend = const DeviceBackend* (*)();

}  // namespace tessera::comm

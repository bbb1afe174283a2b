// The devices of ranks that a C++ program starts, and what carries their tensors.
//
// Note [Devices of ranks]
//   Where torch sees an accelerator, this rank's device is the one that the program made the current one, else (that is still the
//   first) that of its local rank, which is the current one from here on. Where every rank has a device of its own and the library of
//   Note [Back ends of devices] is there, tensors of devices go over that, else over Gloo with one warning. Where a rank has no device,
//   groups carry tensors of the CPU only.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>

#include "tessera/comm/device_backend.h"
#include "tessera/comm/launch.h"

namespace tessera::comm {

// The device of the rank that has this number on its host; nothing where there is none. Local.
std::optional<c10::Device> own_device(int local_rank);

struct RankDevice {
  c10::DeviceType type = c10::kCPU;        // kCPU: groups carry no tensors of devices
  const DeviceBackend* backend = nullptr;  // null: Gloo

  bool is_used() const { return type != c10::kCPU; }
};

// Finds this process's device. Collective over the ranks of `own`, who use `store`. Value error on all where types differ.
RankDevice find_device(const Launch& own, c10d::Store& store);

// Gives `group`, whose ranks use `store`, a back end for tensors of the device.
void add_device_backend(const RankDevice& device, c10d::ProcessGroup& group,
                        const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);

}  // namespace tessera::comm

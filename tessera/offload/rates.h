// Rates: how fast bytes move between a device, host memory and a disk here. They are measured in a moment, not looked up: they
// follow from the machine, and from who else uses it.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <string>

#include "tessera/offload/nvme_file.h"

namespace tessera::offload {

// Bytes a second.
struct Rates {
  double bus = 0;     // between host and device, each way, while both are busy
  double host = 0;    // what the host's update reads and writes, on all threads
  double memory = 0;  // what host memory takes in all, at least
  double device = 0;  // what a copy on the device reads and writes
  double disk = 0;    // written to a file and read back; 0: none was asked for

  std::array<double*, 5> all() { return {&bus, &host, &memory, &device, &disk}; }
};

struct RateOptions {
  c10::Device device;       // the CPU has no bus
  bool pin_memory = true;   // host memory of copies is page-locked
  std::string folder{};     // folder of the file; empty: none
  QueueMaker make_queue{};  // of its transfers
};

// Measures in some 100 ms, with 120 MB of host memory, and on a device 64 MiB of its memory and of page-locked memory each, which
// torch's allocators keep for what comes. Local; the host waits for the device.
Rates measure_rates(const RateOptions& options);

}  // namespace tessera::offload

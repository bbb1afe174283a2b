// What an update of states that live elsewhere takes, as arithmetic: how long, which share of it the device should do, and how much
// of the states has room on the device.
//
// Note [Byte model]
//   For an element that the host updates, its kernel reads and writes `kernel` bytes of host memory, and weights pass the bus each
//   way. For an element that the device updates, masters and states pass the bus each way, which host memory serves; the device's
//   memory moves what its kernel does and, as they come and go, masters and states once more each way. Host, bus and the device
//   work at the same time, so that an update takes as long as the busiest of them, which the share decides. An update of states
//   on a disk takes at least as long as the disk's transfers, whatever the share. Gradients leave beside the backward and do not
//   count. A model on the CPU passes nothing over a bus. A step is its forward and backward, and what of the update is not hidden
//   behind those that the update goes on beside: step_time().
#pragma once

#include <cstdint>

#include "tessera/amp/precision.h"
#include "tessera/offload/rates.h"

namespace tessera::engine {

// Bytes of one element's update.
struct UpdateBytes {
  double through = 0;  // each way on the bus, where the device updates
  double of_host = 0;  // each way on the bus, where the host updates
  double kernel = 0;   // read and written by the update, wherever it is
  double disk = 0;     // read and written on the disk; 0: nothing lives on a disk
};
// `moments`: how many the rule has. `weights`: weights live elsewhere, too. `disk`: masters and states are on a disk.
UpdateBytes update_bytes(const amp::PrecisionPolicy& precision, int moments, bool weights, bool disk);

// A step's compute, for each of its micro-batches, and what goes on beside its update. Any unit of time.
struct StepTime {
  double forward = 0, backward = 0;
  int micro_batches = 1;
  bool in_backward = false, runs_on = false;  // as of zero::Options
};
double step_time(const StepTime& step, double update);

// Seconds an element.
struct UpdateTime {
  double bus = 0, host = 0, memory = 0, device = 0, disk = 0;
  double longest() const;
};
UpdateTime update_time(const UpdateBytes& bytes, const offload::Rates& rates, double share);

// The share of the device that takes the least time; the smallest of several such.
double best_share(const UpdateBytes& bytes, const offload::Rates& rates);

// Device memory for the elements that a rank updates.
struct Room {
  double bytes = 0;
  double elements = 0;
  double stays = 0;    // bytes of an element whose masters and states stay, gradients included
  double is_away = 0;  // bytes of another one: its gradient, as far as it waits for the update on the device
};
// The smallest share of the elements that must live elsewhere.
double ratio_that_fits(const Room& room);

}  // namespace tessera::engine

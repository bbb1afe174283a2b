// ShardedModel: the parts that train one engine's parameters, for any stage. The engine above decides when (boundaries,
// counters, schedules); these know how.
#pragma once

#include "tessera/zero/accumulation.h"
#include "tessera/zero/backward_driver.h"
#include "tessera/zero/joining.h"
#include "tessera/zero/modules.h"
#include "tessera/zero/moving.h"
#include "tessera/zero/regions.h"
#include "tessera/zero/state_access.h"
#include "tessera/zero/units.h"
#include "tessera/zero/update_in_backward.h"
#include "tessera/zero/updater.h"

namespace tessera::zero {

// Bytes that an engine holds on this rank, by kind; the terms of the memory formula.
struct Memory {
  int64_t params = 0, grads = 0, master = 0, states = 0, buckets = 0;
  int64_t peak_buckets = 0;    // the most that buckets ever were; pools that peak at different moments are added
  int64_t host = 0, disk = 0;  // bytes of all but buckets that live there and not on the device
  int64_t shared = 0;          // compute parameters that all ranks of the host have together: once, not once a rank
};

struct ShardedModel {
  // See Units and BackwardDriver. Collective.
  ShardedModel(const Options& options, const comm::Mesh& mesh, const std::vector<ParamSpec>& params, optim::Rule rule,
               const std::vector<optim::GroupOptions>& groups, std::function<StepState()> step);
  // Removes hooks and frees gradients and states; parameters keep their values.
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  Memory memory() const;

  Units units;
  BackwardDriver driver;
  Modules modules;
  Regions regions;
  Updater updater;
  UpdateInBackward early;
  Joining joining;
  StateAccess states;
  Accumulation accumulation;
  Moving moving;
};

}  // namespace tessera::zero

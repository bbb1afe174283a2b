// Options of the ZeRO layer.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>

#include "tessera/amp/precision.h"
#include "tessera/shard/buffer.h"
#include "tessera/shard/named_shard.h"

namespace tessera::zero {

// Where a buffer of a size, of a quantity, lives (offload/states.h); null or unset: on the device.
using HomeMaker = std::function<shard::HomePtr(shard::Quantity, int64_t size, const at::TensorOptions&)>;

// Keeps whoever walks through autograd's objects from outside away while what it returns lives. Python's garbage collector, on any
// thread, reads the hooks of every tensor. Unset: nobody does.
using ReaderLock = std::function<std::shared_ptr<void>()>;

// Stage 3. Sizes in elements.
struct GatherOptions {
  bool prefetch = true;                     // the next unit is gathered early
  int64_t max_live = 1'000'000'000;         // no early gather and no keeping beyond this many elements
  int64_t reuse_distance = 0;               // keep a unit whose next use is this near; 0: only if it is the very next
  int64_t persistence_threshold = 100'000;  // parameters up to this size stay whole on every rank
  int64_t model_persistence = std::numeric_limits<int64_t>::max();  // at most so many elements stay whole in all
  // Slices that live on a disk: so many units, and so many elements, are read before their gathers begin.
  int ahead_units = 5;
  int64_t ahead = 500'000'000;
};

struct Options {
  int stage = 0;  // row of shard/placement.h
  amp::PrecisionPolicy precision;
  bool cast = true;                          // floating parameters take the policy's dtype; false: they keep theirs
  int64_t reduce_bucket_size = 500'000'000;  // elements; larger units are split at parameter boundaries
  int64_t min_unit_elements = 1 << 20;       // smaller neighbouring units are merged (one collective each)
  bool overlap = true;                       // start a unit's reduction while the backward goes on
  // Factor of the sum of all ranks' gradients; unset: 1 / Ranks::size(), which makes it their mean.
  std::optional<double> gradient_factor;
  GatherOptions gather;
  uint64_t seed = 0;  // of stochastic rounding
  HomeMaker home;     // of masters and optimizer states
  // Shares of the elements, by units. ratio: of what `home` would take, the share that lives there, the rest staying on the
  // device; device_share: of that again, what the device updates whatever its dtype (Note [Where an update is] in tile.h).
  double ratio = 1, device_share = 0;
  // Home of this rank's slices of partitioned parameters, which then are partitioned on one rank, too.
  HomeMaker weight_home;
  bool pin_memory = true;  // of what goes between the device and a host that updates states which live elsewhere
  // Dtype that gradients travel in where a parameter does not say (ParamSpec::comm); unset: their own.
  std::optional<at::ScalarType> communication;
  // Ranks of one host keep one copy of the compute parameters (Note [Shared parameters]). Nothing happens where they are
  // not sharded: one rank, or stage 0.
  bool share_params = false;
  // An update has several backwards: gradients that live between them leave the device wherever states do. Set by the engine.
  bool accumulates = false;
  bool reduce_at_step = false;  // unmanaged accumulation: reduce once, inside step(); set by the engine
  // Note [Update in the backward] in update_in_backward.h.
  bool update_in_backward = false;
  double unit_clipping = 0;  // with update_in_backward: largest L2 norm of a unit's gradient; 0: none
  // With update_in_backward: largest norm of all gradients, scaled by the last step's norm (Note [Clipping by the step before]).
  double previous_clipping = 0;
  // Note [Updates that run on] in update_lane.h.
  bool update_runs_on = false;
  ReaderLock reader_lock;
};

// What becomes of in-place edits of parameters that were gathered on request, when they are released.
enum class Writes {
  None,      // they are a state error
  FromRank,  // those of one rank hold for all
  Own,       // every rank made the same
};

}  // namespace tessera::zero

// Options of the ZeRO layer.
#pragma once

#include <cstdint>

#include "tessera/amp/precision.h"

namespace tessera::zero {

struct Options {
  int stage = 0;  // row of shard/placement.h
  amp::PrecisionPolicy precision;
  int64_t reduce_bucket_size = 500'000'000;  // elements; larger units are split at parameter boundaries
  int64_t min_unit_elements = 1 << 20;       // smaller neighbouring units are merged (one collective each)
  bool overlap = true;                       // start a unit's reduction while the backward goes on
  bool average = true;                       // divide the summed gradients by the data-parallel size
  bool reduce_at_step = false;               // unmanaged accumulation: reduce once, inside step()
};

}  // namespace tessera::zero

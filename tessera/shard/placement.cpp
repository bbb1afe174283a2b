#include "tessera/shard/placement.h"

#include <array>

#include "tessera/base/error.h"

namespace tessera::shard {

namespace {
using enum Placement;
constexpr std::array<StagePlacements, 4> kStages{{
    {Replicate, Replicate, ReduceAt::Boundary, Replicate},
    {Replicate, Shard, ReduceAt::Boundary, Shard},
    {Replicate, Shard, ReduceAt::EveryBackward, Shard},
    {Shard, Shard, ReduceAt::EveryBackward, Shard},
}};
}  // namespace

const StagePlacements& placements_of_stage(int stage) {
  TESSERA_CHECK_VALUE(stage >= 0 && stage < static_cast<int>(kStages.size()), "shard.placement",
                      "zero_optimization.stage must be 0, 1, 2 or 3, got ", stage);
  return kStages[stage];
}

}  // namespace tessera::shard

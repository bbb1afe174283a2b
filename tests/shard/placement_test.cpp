#include "tessera/shard/placement.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace tessera::shard {

TEST(Placement, StagesAreTheRowsOfZero) {
  using enum Placement;
  const auto row = [](int stage) { return placements_of_stage(stage); };
  EXPECT_EQ(row(0).grads, Replicate);
  EXPECT_EQ(row(0).states, Replicate);
  EXPECT_EQ(row(1).grads, Shard);
  EXPECT_EQ(row(1).states, Shard);
  EXPECT_EQ(row(1).reduce_at, ReduceAt::Boundary);
  EXPECT_EQ(row(2).reduce_at, ReduceAt::EveryBackward);
  for (int stage = 0; stage < 3; ++stage)
    EXPECT_EQ(row(stage).params, Replicate);
  EXPECT_EQ(row(3).params, Shard);
  for (int stage = 0; stage <= 3; ++stage) {
    EXPECT_EQ(row(stage).shards_params(), stage == 3);
    EXPECT_EQ(row(stage).shards_grads(), stage >= 1);
    EXPECT_EQ(row(stage).shards_states(), stage >= 1);
  }
}

TEST(Placement, OtherStagesAreValueErrors) {
  EXPECT_THROW(placements_of_stage(-1), c10::ValueError);
  EXPECT_THROW(placements_of_stage(4), c10::ValueError);
}

}  // namespace tessera::shard

#include "tessera/pipeline/partition.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::pipeline {
namespace {

using Ints = std::vector<int>;

// Against all cuts there are: tests/python/pipeline/test_schedule.py.
TEST(Partition, TheHeaviestPartIsAsLightAsCanBe) {
  EXPECT_EQ(split({1, 1, 1, 1}, 2), (Ints{0, 2, 4}));
  EXPECT_EQ(split({5, 1, 1, 1, 1, 1}, 2), (Ints{0, 1, 6}));
  EXPECT_EQ(split({1, 1, 1}, 3), (Ints{0, 1, 2, 3}));
  EXPECT_EQ(split({1, 1, 1}, 1), (Ints{0, 3}));
  EXPECT_EQ(split({1, 1, 1}, 2), (Ints{0, 1, 3})) << "later parts are fuller";
  EXPECT_THROW(split({1, 1}, 3), c10::ValueError);
}

}  // namespace
}  // namespace tessera::pipeline

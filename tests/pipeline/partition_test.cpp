#include "tessera/pipeline/partition.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>

#include "tests/support/errors.h"

namespace tessera::pipeline {
namespace {

using Ints = std::vector<int>;

// The heaviest part of the best cut of weights[begin:] into `parts`, of all cuts there are.
double best(const std::vector<double>& weights, size_t begin, size_t parts) {
  double first = 0, found = std::numeric_limits<double>::infinity();
  for (size_t end = begin + 1; end + parts <= weights.size() + 1; ++end) {
    first += weights[end - 1];
    if (parts > 1) found = std::min(found, std::max(first, best(weights, end, parts - 1)));
  }
  return parts > 1 ? found : first;
}

TEST(Partition, NoCutIsBetter) {
  std::mt19937 draw(0);
  for (size_t count = 1; count <= 8; ++count) {
    for (size_t parts = 1; parts <= std::min<size_t>(count, 4); ++parts) {
      for (int sample = 0; sample < 10; ++sample) {
        std::vector<double> weights(count);
        for (double& weight : weights)
          weight = draw() % 10;
        const Ints bounds = split(weights, static_cast<int>(parts));
        ASSERT_EQ(bounds.size(), parts + 1);
        EXPECT_EQ(bounds.front(), 0);
        EXPECT_EQ(bounds.back(), static_cast<int>(count));
        double heaviest = 0;
        for (size_t i = 0; i < parts; ++i) {
          EXPECT_LT(bounds[i], bounds[i + 1]);
          heaviest = std::max(heaviest, std::accumulate(&weights[bounds[i]], weights.data() + bounds[i + 1], 0.0));
        }
        EXPECT_EQ(heaviest, best(weights, 0, parts)) << ::testing::PrintToString(weights) << " in " << parts;
      }
    }
  }
}

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

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

TEST(Partition, MethodsOfLayers) {
  const std::vector<int64_t> elements{100, 6, 6, 0, 6, 6, 6};
  const std::vector<std::string> classes{"Embed", "Block", "Block", "relu", "Block", "Block", "Linear"};
  int counted = 0;
  const ListedLayers layers{
      .count = 7,
      .trained_elements = [&](int layer) { return ++counted, elements[layer]; },
      .class_name = [&](int layer) { return classes[layer]; },
      .matcher =
          [](const std::string& pattern) { return [pattern](const std::string& name) { return name == pattern; }; }};
  const auto error = [&](const char* method) {
    return testing::error_of<c10::ValueError>([&] { bounds_of(method, 2, layers); });
  };
  EXPECT_EQ(bounds_of("uniform", 2, layers), (Ints{0, 3, 7}));
  EXPECT_EQ(bounds_of("parameters", 1, layers), (Ints{0, 7}));
  EXPECT_EQ(counted, 0) << "nobody needs to build the layers";
  EXPECT_EQ(bounds_of("Parameters", 2, layers), (Ints{0, 1, 7}));
  const int middle = bounds_of("type:Block", 2, layers)[1];
  EXPECT_TRUE(middle == 3 || middle == 4) << "two blocks each";
  EXPECT_HAS(error("type:Embed"), "finds 1 layers for 2 parts; the layers are Block, Embed, Linear, relu");
  EXPECT_HAS(error("profile"), "no partition method 'profile'");
}

}  // namespace
}  // namespace tessera::pipeline

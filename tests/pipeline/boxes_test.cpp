#include "tessera/pipeline/boxes.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/support/errors.h"

namespace tessera::pipeline {
namespace {

using testing::error_of;

int64_t count(const Box& box) {
  int64_t elements = 1;
  for (const auto& [begin, end] : box)
    elements *= end - begin;
  return elements;
}

// All elements that a rank of one side wants come from some part of the other, each once; no part sends one twice.
void expect_partition(const Sizes& whole, const std::vector<Box>& held, const std::vector<Box>& wanted) {
  int64_t all = 0;
  for (const Box& box : wanted) {
    int64_t found = 0;
    for (int part = 0; part < static_cast<int>(held.size()); ++part)
      if (const auto common = route(held, part, box)) found += count(*common);
    EXPECT_EQ(found, count(box));
    all += found;
  }
  EXPECT_EQ(all, c10::multiply_integers(whole));
}

// The way there and the way back.
void expect_partition(const WholeTensor& whole, const std::vector<Box>& wanted) {
  expect_partition(whole.sizes, whole.held, wanted);
  expect_partition(whole.sizes, wanted, whole.held);
}

// Rows and a sequence of two dims, or packed tokens (both cuts along one dim), with parts of any size and samples of any.
TEST(Boxes, EveryElementGoesOnceWhateverTheLayouts) {
  std::mt19937 random(7);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int i = 0; i < 300; ++i) {
    const auto some = [&] { return static_cast<int>(draw(1, 3)); };
    const Layout source{some(), some(), some()}, target{some(), some(), some()};
    const Dims dims{0, static_cast<int>(draw(0, 1))};
    Sizes sizes(9);
    for (int64_t& size : sizes)
      size = draw(0, 5);
    std::vector<Sizes> shapes;
    for (int part = 0; part < source.parts(); ++part)
      shapes.push_back(dims.sequence == 0
                           ? Sizes{sizes[part], 2}
                           : Sizes{sizes[part / source.sequence], 1 + sizes[8 - part % source.sequence]});
    const WholeTensor whole = whole_of(source, dims, shapes, "here");
    std::optional<Sizes> samples;
    if (draw(0, 1) == 1) {
      samples.emplace();
      for (int64_t left = whole.sizes[0]; left > 0; left -= samples->back())
        samples->push_back(draw(1, left));
    }
    expect_partition(whole, wanted_of(target, dims, whole.sizes, samples, "here"));
  }
}

TEST(Boxes, ReplicasTakeTurns) {
  const Layout layout{.batch = 2, .replicas = 2};
  std::vector<int> holders;
  for (int taker = 0; taker < 4; ++taker)
    holders.push_back(layout.holder(1, taker));
  EXPECT_EQ(holders, (std::vector{2, 3, 2, 3}));
}

TEST(Boxes, WhatIsWantedIsHeldOnce) {
  const Dims dims{0, 1};
  const auto rows = whole_of({.batch = 2}, dims, {{3, 4, 5}, {2, 4, 5}}, "x");
  EXPECT_EQ(rows.sizes, (Sizes{5, 4, 5}));
  expect_partition(rows, wanted_of({.batch = 3, .sequence = 2}, dims, rows.sizes, {}, "x"));
  const auto tokens = whole_of({.batch = 2, .sequence = 2}, dims, {{1, 3}, {1, 2}, {2, 3}, {2, 2}}, "x");
  EXPECT_EQ(tokens.sizes, (Sizes{3, 5}));
  EXPECT_EQ(tokens.held[3], (Box{{1, 3}, {3, 5}}));
  expect_partition(tokens, wanted_of({.replicas = 2}, dims, tokens.sizes, {}, "x"));
  const Dims packed{0, 0};
  const auto stretch = whole_of({.batch = 2, .sequence = 2}, packed, {{3}, {2}, {4}, {4}}, "x");
  EXPECT_EQ(stretch.sizes, Sizes{13});
  const auto by_sample = wanted_of({.batch = 2}, packed, stretch.sizes, Sizes{1, 4, 8}, "x");
  EXPECT_EQ(by_sample, (std::vector<Box>{{{0, 5}}, {{5, 13}}}));
  expect_partition(stretch, by_sample);
  const auto scalar = whole_of({.batch = 2}, dims, {{}, {}}, "x");
  EXPECT_EQ(route(scalar.held, 0, {}), Box());
  EXPECT_FALSE(route(scalar.held, 1, {}));
}

TEST(Boxes, PartsThatDoNotFitAreNamed) {
  EXPECT_HAS(error_of([] { whole_of({.batch = 2}, {}, {{3, 4}, {3, 5}}, "here"); }), "[3, 4] and [3, 5]");
  EXPECT_HAS(error_of([] { whole_of({.batch = 2}, {2, {}}, {{3}, {3}}, "here"); }), "batch_dim is 2");
  EXPECT_HAS(error_of([] { whole_of({.batch = 1, .sequence = 2}, {0, 1}, {{2, 3}, {1, 3}}, "here"); }),
             "do not fit together");
  EXPECT_HAS(error_of([] { whole_of({.batch = 2, .sequence = 2}, {0, 1}, {{2, 3}, {1, 3}, {2, 3}, {2, 3}}, "here"); }),
             "rows along dim 0");
  EXPECT_HAS(error_of([] { wanted_of({.batch = 2}, {}, {5}, Sizes{1, 2}, "here"); }), "are 3, a tensor has 5");
  EXPECT_HAS(error_of([] { whole_of({.batch = 2, .sequence = 2}, {0, 1}, {{1, 3}, {1, 2}, {1, 3}, {1, 3}}, "here"); }),
             "other lengths along dim 1: [[3, 2], [3, 3]]");
}

}  // namespace
}  // namespace tessera::pipeline

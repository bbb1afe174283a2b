#include "tessera/pipeline/boxes.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::pipeline {
namespace {

using testing::error_of;

// All elements that a rank of the target wants come from some part of the source, each once.
void expect_partition(const WholeTensor& whole, const std::vector<Box>& wanted) {
  const auto count = [](const Box& box) {
    int64_t elements = 1;
    for (const auto& [begin, end] : box)
      elements *= end - begin;
    return elements;
  };
  for (const Box& box : wanted) {
    int64_t found = 0;
    for (int part = 0; part < static_cast<int>(whole.held.size()); ++part)
      if (const auto common = route(whole.held, part, box)) found += count(*common);
    EXPECT_EQ(found, count(box));
  }
}

// More layouts: tests/python/hybrid/test_layout.py.
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
  EXPECT_HAS(error_of([] { wanted_of({.batch = 2}, {}, {5}, Sizes{1, 2}, "here"); }), "are 3, a tensor has 5");
  EXPECT_HAS(error_of([] { whole_of({.batch = 2, .sequence = 2}, {0, 1}, {{1, 3}, {1, 2}, {1, 3}, {1, 3}}, "here"); }),
             "other lengths along dim 1: [[3, 2], [3, 3]]");
}

}  // namespace
}  // namespace tessera::pipeline

#include "tessera/checkpoint/numbering.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/parts.h"

namespace tessera::checkpoint {

TEST(Numbering, RunsAreTheElementsThatTheSliceHas) {
  const std::vector<int64_t> shape{3, 6, 2};
  const at::Tensor whole = at::arange(36).view(shape);
  for (int64_t dim = 0; dim < 3; ++dim) {
    const Slice slice{dim, {{shape[dim] / 2, shape[dim]}, {0, 1}}};
    const at::Tensor part = select(whole, slice).view(-1);
    ASSERT_EQ(part.numel(), numel_of(shape, &slice));
    for (int64_t begin = 0; begin < part.numel(); ++begin) {
      for (int64_t end = begin; end <= part.numel(); ++end) {
        int64_t at = begin;
        for (const checkpoint::Run& run : runs_of(shape, &slice, {begin, end})) {
          EXPECT_EQ(run.local, at);
          for (int64_t i = 0; i < run.size; ++i, ++at)
            EXPECT_EQ(part[at].item<int64_t>(), run.begin + i);
        }
        EXPECT_EQ(at, end);
      }
    }
  }
  EXPECT_EQ(runs_of(shape, nullptr, {4, 9}), (std::vector<checkpoint::Run>{{4, 4, 5}}));
}

TEST(Numbering, OrderIsThatOfTheMemory) {
  const auto order = [](const at::Tensor& t) { return order_of(shard::Form(t)); };
  const at::Tensor t = at::zeros({2, 3, 4, 5});
  EXPECT_TRUE(order(t).empty());
  EXPECT_TRUE(order(at::zeros({})).empty());
  EXPECT_EQ(order(t.contiguous(at::MemoryFormat::ChannelsLast)), (std::vector<int64_t>{0, 2, 3, 1}));
  EXPECT_EQ(order(at::zeros({3, 4}).t()), (std::vector<int64_t>{1, 0}));
  // A dim of one element has no place of its own.
  EXPECT_TRUE(order(at::zeros({4, 1, 5}).as_strided({4, 1, 5}, {5, 1, 1})).empty());
  EXPECT_TRUE(order(at::zeros({1, 4}).t()).empty());
}

}  // namespace tessera::checkpoint

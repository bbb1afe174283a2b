#include "tessera/shard/layout.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <vector>

namespace tessera::shard {

TEST(Layout, ThePictureInTheHeader) {
  const std::vector<int64_t> numels{40, 3};
  const Layout layout(numels, 2);
  EXPECT_EQ(layout.param(0), (Range{0, 40}));
  EXPECT_EQ(layout.param(1), (Range{64, 67}));
  EXPECT_EQ(layout.size(), 128);
  EXPECT_EQ(layout.shard(0), (Range{0, 64}));
  EXPECT_EQ(layout.shard(1), (Range{64, 128}));
  EXPECT_EQ(layout.owned(0, 0), (Range{0, 40}));
  EXPECT_TRUE(layout.owned(0, 1).empty());
  EXPECT_EQ(layout.padding(), (std::vector<Range>{{40, 64}, {67, 128}}));
}

TEST(Layout, SlicesCoverEveryParameterOnceForOddSizes) {
  const std::vector<int64_t> numels{1, 3, 17, 0, 1000, 33, 1};
  for (const int shards : {1, 2, 3, 4, 5, 8, 64}) {
    const Layout layout(numels, shards);
    EXPECT_EQ(layout.size() % (shards * kAlignment), 0);
    for (int i = 0; i < layout.count(); ++i) {
      EXPECT_EQ(layout.param(i).begin % kAlignment, 0);
      int64_t covered = 0;
      for (int r = 0; r < shards; ++r)
        covered += layout.owned(i, r).size();
      EXPECT_EQ(covered, numels[i]) << "parameter " << i << " over " << shards;
      if (i > 0) {
        EXPECT_GE(layout.param(i).begin, layout.param(i - 1).end);
      }
    }
    int64_t gaps = 0, used = 0;
    for (const Range& gap : layout.padding())
      gaps += gap.size();
    for (const int64_t n : numels)
      used += n;
    EXPECT_EQ(gaps + used, layout.size());
  }
}

TEST(Layout, RefusesNonsense) {
  const std::vector<int64_t> negative{-1};
  EXPECT_THROW(Layout(negative, 1), c10::ValueError);
  EXPECT_THROW(Layout(std::vector<int64_t>{1}, 0), c10::ValueError);
}

}  // namespace tessera::shard

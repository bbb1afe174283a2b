#include "tessera/base/parallel.h"

#include <gtest/gtest.h>

#include <mutex>
#include <vector>

namespace tessera {

TEST(ParallelRanges, CoversEverythingOnceAtAlignedStarts) {
  for (const int64_t n : {0, 1, 63, 64, 65, 1000, 100000}) {
    std::vector<int> seen(n, 0);
    std::mutex mutex;
    parallel_ranges(n, 128, 64, [&](int64_t begin, int64_t end) {
      const std::lock_guard lock(mutex);
      EXPECT_EQ(begin % 64, 0);
      for (int64_t i = begin; i < end; ++i)
        ++seen[i];
    });
    for (int64_t i = 0; i < n; ++i)
      ASSERT_EQ(seen[i], 1) << i << " of " << n;
  }
}

}  // namespace tessera

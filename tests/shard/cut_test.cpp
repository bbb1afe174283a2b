#include "tessera/shard/cut.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::shard {

// Whatever the dim and the slice: the numbers are those that the whole has there.
TEST(Cut, NumbersAreTheWholes) {
  const std::vector<int64_t> sizes{3, 4, 5};
  const at::Tensor whole = at::arange(60).view(sizes);
  for (int64_t dim = 0; dim < 3; ++dim) {
    for (int64_t begin = 0; begin < sizes[dim]; ++begin) {
      for (int64_t end = begin; end <= sizes[dim]; ++end) {
        // Two slices joined, the second one of what is before the first.
        const std::vector<Range> ranges{{begin, end}, {0, begin}};
        const CutPtr cut = cut_along(sizes, dim, ranges);
        EXPECT_EQ(cut->numel(), 60);
        const at::Tensor part =
            at::cat({whole.slice(dim, begin, end), whole.slice(dim, 0, begin)}, dim).contiguous().flatten();
        const Range some{part.numel() / 3, part.numel()};
        std::vector<int64_t> numbers;
        for_stretches(cut, some, [&](Range piece, int64_t number) {
          EXPECT_EQ(piece.begin, some.begin + static_cast<int64_t>(numbers.size()));
          for (int64_t i = 0; i < piece.size(); ++i)
            numbers.push_back(number + i);
        });
        EXPECT_TRUE(at::tensor(numbers, at::kLong).equal(part.slice(0, some.begin, some.end))) << dim << begin << end;
      }
    }
  }
  std::vector<Range> pieces;
  for_stretches(nullptr, {3, 9}, [&](Range piece, int64_t number) {
    EXPECT_EQ(number, 3);
    pieces.push_back(piece);
  });
  EXPECT_EQ(pieces, (std::vector<Range>{{3, 9}}));
}

TEST(Cut, RefusesASliceThatIsNotThere) {
  EXPECT_HAS(testing::error_of([] { cut_along({3, 4}, 2, {{0, 1}}); }), "no dim 2");
  EXPECT_HAS(testing::error_of([] { cut_along({3, 4}, 1, {{3, 5}}); }), "no slice [3, 5)");
}

}  // namespace tessera::shard

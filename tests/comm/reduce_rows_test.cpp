#include "tessera/comm/reduce_rows.h"

#include <ATen/Parallel.h>
#include <cmath>
#include <limits>

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using testing::inputs;
using testing::reference_reduce;
using testing::same_bits;

std::vector<const void*> pointers(const std::vector<at::Tensor>& rows) {
  std::vector<const void*> result;
  for (const auto& row : rows)
    result.push_back(row.const_data_ptr());
  return result;
}

at::Tensor reduce(const std::vector<at::Tensor>& rows, ReduceOp op) {
  at::Tensor out = at::empty_like(rows[0]);
  reduce_rows(out.mutable_data_ptr(), pointers(rows).data(), static_cast<int>(rows.size()), out.numel(),
              out.scalar_type(), op);
  return out;
}

const std::vector<at::ScalarType> kFloats = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
const std::vector<at::ScalarType> kIntegers = {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong};

TEST(ReduceRows, AgreesWithTheReferenceForEveryDtypeOpAndSize) {
  auto dtypes = kFloats;
  dtypes.insert(dtypes.end(), kIntegers.begin(), kIntegers.end());
  for (const auto dtype : dtypes) {
    for (const auto op : testing::kReductions) {
      if (!can_reduce(dtype, op)) continue;
      for (const int count : {1, 2, 3, 4, 5, 8, 10}) {
        for (const int64_t n : {0, 1, 3, 17, 1023, 1025, 4096}) {
          const auto rows = inputs(static_cast<int>(n), count, n, dtype);
          EXPECT_TRUE(same_bits(reduce(rows, op), reference_reduce(rows, op)))
              << dtype << " op " << static_cast<int>(op) << " rows " << count << " n " << n;
        }
      }
    }
  }
}

TEST(ReduceRows, AResultDependsNeitherOnPositionNorLength) {
  const auto rows = inputs(1, 5, 3000, at::kBFloat16);
  std::vector<at::Tensor> halves = inputs(1, 2, 3000, at::kHalf);
  halves[0] = at::arange(-3000, 0, at::kShort).view(at::kHalf);  // NaNs of many payloads
  for (const auto& all : {rows, halves}) {
    const auto whole = reduce(all, ReduceOp::Sum);
    for (const int64_t begin : {0, 1, 7, 1024, 2999}) {
      std::vector<at::Tensor> parts;
      for (const auto& row : all)
        parts.push_back(row.narrow(0, begin, 3000 - begin));
      EXPECT_TRUE(same_bits(reduce(parts, ReduceOp::Sum), whole.narrow(0, begin, 3000 - begin)));
    }
  }
}

TEST(ReduceRows, SixteenBitSumsAreRoundedOnce) {
  // 256 + 1 + 1 is 258, a bf16 number; rounding after each addition would stay at 256.
  const std::vector<at::Tensor> rows = {at::full({1}, 256, at::kBFloat16), at::full({1}, 1, at::kBFloat16),
                                        at::full({1}, 1, at::kBFloat16)};
  EXPECT_EQ(reduce(rows, ReduceOp::Sum).item<float>(), 258.0f);
}

// All values of fp16, each beside each of a few others: subnormals, halves of steps, overflow.
TEST(ReduceRows, EveryHalfIsConvertedExactlyAndRoundedToNearest) {
  const at::Tensor all = at::arange(-32768, 32768, at::kShort).view(at::kHalf);
  const at::Tensor number = all.where(all.isfinite(), at::zeros_like(all));
  EXPECT_TRUE(same_bits(reduce({number}, ReduceOp::Sum), number));
  for (const double other : {6e-8, 3e-5, 0.00024414, 1.0, 2049.0, 65504.0, -65504.0}) {
    const std::vector<at::Tensor> rows = {number, at::full_like(number, other)};
    EXPECT_TRUE(same_bits(reduce(rows, ReduceOp::Sum), reference_reduce(rows, ReduceOp::Sum))) << other;
    EXPECT_TRUE(same_bits(reduce(rows, ReduceOp::Avg), reference_reduce(rows, ReduceOp::Avg))) << other;
  }
}

TEST(ReduceRows, TheOrderIsThatOfTheRanks) {
  const at::Tensor large = at::full({1}, 1e8f), minus = at::full({1}, -1e8f), one = at::ones({1});
  for (int between = 0; between < 8; ++between) {
    std::vector<at::Tensor> rows(between, one);  // lost in the large one, if they come behind it
    rows.insert(rows.begin(), large);
    rows.insert(rows.end(), {minus, one});
    EXPECT_EQ(reduce(rows, ReduceOp::Sum).item<float>(), 1.0f) << rows.size();
  }
}

TEST(ReduceRows, OutMayBeAnyRow) {
  for (const int count : {2, 3, 4, 7}) {
    for (int target = 0; target < count; ++target) {
      auto rows = inputs(2, count, 2500, at::kFloat);
      const auto want = reference_reduce(rows, ReduceOp::Avg);
      reduce_rows(rows[target].mutable_data_ptr(), pointers(rows).data(), count, 2500, at::kFloat, ReduceOp::Avg);
      EXPECT_TRUE(same_bits(rows[target], want));
    }
  }
}

TEST(ReduceRows, NanAndInfinityTravel) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const auto dtype : kFloats) {
    for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max}) {
      for (const int where : {0, 1, 2}) {
        std::vector<at::Tensor> rows(3, at::ones({40}, dtype));
        rows[where] = at::full({40}, nan, dtype);
        EXPECT_TRUE(reduce(rows, op).isnan().all().item<bool>()) << dtype << static_cast<int>(op) << where;
      }
    }
    std::vector<at::Tensor> rows = {at::ones({40}, dtype), at::full({40}, inf, dtype)};
    EXPECT_TRUE(reduce(rows, ReduceOp::Sum).isinf().all().item<bool>());
  }
}

TEST(ReduceRows, IntegersWrap) {
  const std::vector<at::Tensor> rows(2, at::full({3}, std::numeric_limits<int32_t>::max(), at::kInt));
  EXPECT_EQ(reduce(rows, ReduceOp::Sum)[0].item<int32_t>(), -2);
}

TEST(ReduceRows, SaysWhatItTakes) {
  for (const auto dtype : kIntegers)
    EXPECT_FALSE(can_reduce(dtype, ReduceOp::Avg));
  EXPECT_TRUE(can_reduce(at::kBool, ReduceOp::Max));
  EXPECT_FALSE(can_reduce(at::kBool, ReduceOp::Sum));
  EXPECT_FALSE(can_reduce(at::kComplexFloat, ReduceOp::Sum));
}

TEST(ReduceRows, LargeRowsOnSeveralThreadsKeepTheBits) {
  const auto rows = inputs(3, 2, 1200000, at::kBFloat16);
  const auto want = reference_reduce(rows, ReduceOp::Sum);
  const int before = at::get_num_threads();
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(same_bits(reduce(rows, ReduceOp::Sum), want));
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace tessera::comm

// Split master weights: exact over all low halves and special upper halves, in every table.
#include "tessera/kernels/split.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tessera/kernels/convert.h"
#include "tessera/kernels/table.h"

namespace tessera::kernels {
namespace {

std::vector<uint32_t> upper_halves() {
  // Zero, denormals, the smallest normal, around one, the largest, infinity and NaN.
  std::vector<uint32_t> list{0x0000, 0x0001, 0x007f, 0x0080, 0x3f7f, 0x3f80, 0x3f81, 0x7f00,
                             0x7f7e, 0x7f7f, 0x7f80, 0x7f81, 0x7fbf, 0x7fc0, 0x7ffe, 0x7fff};
  std::mt19937 bits(1);
  for (int i = 0; i < 48; ++i)
    list.push_back(bits() & 0x7fff);
  const size_t positive = list.size();
  for (size_t i = 0; i < positive; ++i)
    list.push_back(list[i] | 0x8000);
  return list;
}

TEST(Split, IsExactOverAllLowHalves) {
  constexpr int64_t n = 65536;
  std::vector<uint32_t> whole(n), joined(n);
  std::vector<uint16_t> weight(n), residual(n);
  for (const Table* table : available_tables()) {
    for (uint32_t upper : upper_halves()) {
      for (uint32_t low = 0; low < n; ++low)
        whole[low] = upper << 16 | low;
      table->split(weight.data(), residual.data(), reinterpret_cast<const float*>(whole.data()), n);
      table->join(reinterpret_cast<float*>(joined.data()), weight.data(), residual.data(), n);
      int wrong = 0;
      for (uint32_t low = 0; low < n; ++low) {
        const auto value = std::bit_cast<float>(whole[low]);
        if (std::isnan(value)) {  // alone and with its residual
          wrong += !std::isnan(float_from_bf16(weight[low])) || !std::isnan(std::bit_cast<float>(joined[low]));
          continue;
        }
        const bool tie = low == 0x8000;
        wrong += joined[low] != whole[low];
        wrong += weight[low] != (tie ? upper + 1 : bf16_from_float(value));
      }
      EXPECT_EQ(wrong, 0) << table->name << ", upper half " << std::hex << upper;
    }
  }
}

// A weight that a user set to zero, beside the residual of the one before.
TEST(Split, AZeroBesideAnyResidualIsNone) {
  constexpr int64_t n = 65536;
  std::vector<float> joined(n);
  std::vector<uint16_t> residual(n);
  for (int64_t i = 0; i < n; ++i)
    residual[i] = static_cast<uint16_t>(i);
  for (const Table* table : available_tables()) {
    for (const uint16_t zero : {0, 0x8000}) {
      table->join(joined.data(), std::vector<uint16_t>(n, zero).data(), residual.data(), n);
      int wrong = 0;
      for (const float value : joined)
        wrong += !(std::abs(value) < 1e-37F);
      EXPECT_EQ(wrong, 0) << table->name;
    }
  }
}

TEST(Split, InfinityHasNoResidual) {
  const float inf = std::numeric_limits<float>::infinity();
  for (float value : {inf, -inf}) {
    uint16_t weight = 1, residual = 1;
    split(&weight, &residual, &value, 1);
    EXPECT_EQ(float_from_bf16(weight), value);
    EXPECT_EQ(residual, 0);
  }
}

}  // namespace
}  // namespace tessera::kernels

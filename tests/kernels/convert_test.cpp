// Stochastic rounding of single elements over all random bits, and its mean over the drawn ones in every table.
#include "tessera/kernels/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tessera/kernels/table.h"
#include "tests/kernels/kernel_data.h"

namespace tessera::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Type {
  DType dtype;
  float (*widen)(uint16_t);
  uint16_t (*nearest)(float);
  uint16_t (*stochastic)(float, uint32_t);
  uint16_t largest;
};
const Type kTypes[] = {
    {DType::BF16, [](uint16_t h) { return float_from_bf16(h); }, [](float x) { return bf16_from_float(x); },
     [](float x, uint32_t r) { return bf16_stochastic(x, r); }, 0x7f7f},
    {DType::F16, [](uint16_t h) { return float_from_f16(h); }, [](float x) { return f16_from_float(x); },
     [](float x, uint32_t r) { return f16_stochastic(x, r); }, 0x7bff},
};

TEST(Stochastic, KeepsWhatTheTypeHolds) {
  for (const Type& type : kTypes) {
    for (uint32_t half = 0; half < 65536; ++half) {
      const float value = type.widen(static_cast<uint16_t>(half));
      for (uint32_t random : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
        const uint16_t result = type.stochastic(value, random);
        if (std::isnan(value)) {
          EXPECT_TRUE(std::isnan(type.widen(result)));
        } else {
          EXPECT_EQ(result, half);
        }
      }
    }
  }
}

// Of the 65536 draws, as many go up as the dropped part asks for.
TEST(Stochastic, GoesUpAsOftenAsTheDroppedPartIsLarge) {
  for (const Type& type : kTypes) {
    for (uint32_t half : {0x0000u, 0x0001u, 0x0123u, 0x03ffu, 0x0400u, 0x3c00u, 0x4b7fu, uint32_t{type.largest} - 1u}) {
      const auto lower = static_cast<uint16_t>(half), higher = static_cast<uint16_t>(half + 1);
      const double from = type.widen(lower), to = type.widen(higher);
      for (double fraction : {0.0, 1 / 8192.0, 0.125, 0.3, 0.5, 0.7, 8191 / 8192.0}) {
        const auto value = static_cast<float>(from + fraction * (to - from));
        // What fp32 holds; of denormals in fp16 the nearest multiple of 2^-37 (convert.h).
        const bool denormal = type.dtype == DType::F16 && half < 0x400;
        const float held = denormal ? std::nearbyint(value * 0x1p37f) * 0x1p-37f : value;
        const double wanted = (held - from) / (to - from) * 65536;
        for (uint16_t sign : {0x0000, 0x8000}) {
          int up = 0;
          for (uint32_t random = 0; random < 65536; ++random) {
            const uint16_t result = type.stochastic(sign ? -value : value, random);
            ASSERT_TRUE(result == (lower | sign) || result == (higher | sign)) << value << " " << random;
            up += result == (higher | sign) ? 1 : 0;
          }
          EXPECT_EQ(up, wanted) << value;
        }
      }
    }
  }
}

TEST(Stochastic, AboveTheLargestFiniteValue) {
  for (const Type& type : kTypes) {
    const float largest = type.widen(type.largest);
    const float unit = largest - type.widen(static_cast<uint16_t>(type.largest - 1));
    for (float value : {largest, std::nextafter(largest, kInf), std::nextafter(largest + unit / 2, 0.0f),
                        largest + unit / 2, 3.4e38f, std::numeric_limits<float>::max(), kInf}) {
      const float wanted = type.dtype == DType::F16 || std::isinf(value) ? type.widen(type.nearest(value)) : largest;
      for (uint32_t random : {0u, 0x8000u, 0xffffu}) {
        EXPECT_EQ(type.widen(type.stochastic(value, random)), wanted) << value;
        EXPECT_EQ(type.widen(type.stochastic(-value, random)), -wanted) << value;
      }
    }
    for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xffffffffu, 0xffc00000u}) {
      for (uint32_t random : {0u, 0x8000u, 0xffffu})
        EXPECT_TRUE(std::isnan(type.widen(type.stochastic(std::bit_cast<float>(bits), random))));
    }
  }
}

TEST(Stochastic, MeansAreTheValue) {
  constexpr int64_t n = 1 << 20;
  std::vector<float> src(n);
  std::vector<uint16_t> rounded(n);
  for (const Table* table : available_tables()) {
    for (const Type& type : kTypes) {
      for (float value : {1.0037f, -0.70001f, 3.3e-5f, -1.23e-6f, 60001.7f, 4e-7f}) {
        std::fill(src.begin(), src.end(), value);
        table->scaled_copy_stochastic(rounded.data(), type.dtype, src.data(), DType::F32, 1.0f, n, {1, 2, 3});
        double sum = 0;
        for (uint16_t half : rounded)
          sum += type.widen(half);
        const double nearest = type.widen(type.nearest(value));
        const double other =
            type.widen(static_cast<uint16_t>(type.nearest(value) + (nearest > value ? -1 : 1) * (value > 0 ? 1 : -1)));
        const double unit = std::fabs(nearest - other), up = std::fabs(value - nearest) / unit;
        const double sigma = unit * std::sqrt(up * (1 - up) / n);
        EXPECT_LT(std::fabs(sum / n - value), 5 * sigma + unit * 0x1p-16) << table->name << " " << value;
        EXPECT_GT(std::fabs(nearest - value), 5 * sigma) << "a value that nearest rounding gets right shows nothing";
      }
    }
  }
}

// What it is for: many small additions into 16 bits.
TEST(Stochastic, SmallAdditionsAreNotLost) {
  constexpr int64_t n = 4096;
  constexpr int kTimes = 1024;
  const std::vector<float> small(n, 1e-3f);
  for (const Table* table : available_tables()) {
    for (const Type& type : kTypes) {
      std::vector<uint16_t> exact(n, type.nearest(1.0f)), nearest(n, type.nearest(1.0f));
      for (uint64_t step = 0; step < kTimes; ++step) {
        table->scaled_add_stochastic(exact.data(), type.dtype, small.data(), DType::F32, 0.1f, n, {1, step, 0});
        table->scaled_add(nearest.data(), type.dtype, small.data(), DType::F32, 0.1f, n);
      }
      double sum = 0;
      for (uint16_t half : exact)
        sum += type.widen(half);
      // A draw goes up a unit with probability 1e-4 / unit.
      const double unit = type.widen(static_cast<uint16_t>(type.nearest(1.0f) + 1)) - 1.0;
      const double sigma = std::sqrt(1e-4 * unit * kTimes / n);
      EXPECT_NEAR(sum / n, 1 + kTimes * 1e-4, 5 * sigma) << table->name;
      EXPECT_EQ(type.widen(nearest[0]), 1.0f) << "nearest rounding loses them all";
    }
  }
}

}  // namespace
}  // namespace tessera::kernels

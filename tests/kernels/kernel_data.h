// Buffers with hard values at any byte offset, and comparisons by bits.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tessera/kernels/convert.h"
#include "tessera/kernels/types.h"

namespace tessera::kernels::testing {

constexpr DType kDTypes[] = {DType::F32, DType::BF16, DType::F16};

inline float get(const void* p, DType dtype, int64_t i) {
  const char* at = static_cast<const char*>(p) + i * static_cast<int64_t>(size_of(dtype));
  if (dtype == DType::F32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, at, 2);
  return dtype == DType::BF16 ? float_from_bf16(half) : float_from_f16(half);
}

inline void put(void* p, DType dtype, int64_t i, float value) {
  char* at = static_cast<char*>(p) + i * static_cast<int64_t>(size_of(dtype));
  if (dtype == DType::F32) {
    std::memcpy(at, &value, 4);
    return;
  }
  const uint16_t half = dtype == DType::BF16 ? bf16_from_float(value) : f16_from_float(value);
  std::memcpy(at, &half, 2);
}

// Sizes around the vectors and the prefetched chunks.
inline std::vector<int64_t> sizes() {
  std::vector<int64_t> list;
  for (int64_t n = 0; n <= 70; ++n)
    list.push_back(n);
  for (int64_t n : {127, 512, 543, 4095, 4096, 4097, 4113})
    list.push_back(n);
  return list;
}

// n elements that start `offset` bytes behind an aligned address, with bytes around them that
// nobody may touch.
class Buffer {
 public:
  Buffer(DType dtype, int64_t n, int offset = 0)
      : dtype_(dtype), n_(n), offset_(64 + offset), bytes_(192 + n * size_of(dtype), 0xa5) {}

  void* data() { return bytes_.data() + offset_; }
  const void* data() const { return bytes_.data() + offset_; }
  float* floats() { return reinterpret_cast<float*>(data()); }
  float at(int64_t i) const { return get(data(), dtype_, i); }

  Buffer& fill(const std::vector<float>& values) {
    for (int64_t i = 0; i < n_; ++i)
      put(data(), dtype_, i, values[i % values.size()]);
    return *this;
  }
  Buffer& fill_random(unsigned seed, bool positive = false) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> normal(0, 1);
    for (int64_t i = 0; i < n_; ++i) {
      const float value = std::ldexp(normal(bits), static_cast<int>(bits() % 24) - 12);
      put(data(), dtype_, i, positive ? std::fabs(value) : value);
    }
    return *this;
  }
  // Every seventh element or so becomes a value where rounding, overflow or NaN handling can go
  // wrong.
  Buffer& sprinkle(unsigned seed) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    const float hard[] = {0.0f,
                          -0.0f,
                          inf,
                          -inf,
                          std::nanf(""),
                          1e-45f,
                          -1e-39f,
                          1.17e-38f,
                          3e38f,
                          -3.4e38f,
                          65504.0f,
                          65519.9f,
                          65520.0f,
                          6e-8f,
                          2.9e-8f,
                          2.9803e-8f,
                          6.1e-5f,
                          1.00390625f,
                          1.01171875f,
                          std::bit_cast<float>(0x3f801000u),  // half way between two values of fp16
                          std::bit_cast<float>(0x3f803000u),
                          std::bit_cast<float>(0x477fefffu),  // the last that fp16 rounds down to its largest
                          std::bit_cast<float>(0x7f800001u),
                          std::bit_cast<float>(0xffffffffu)};
    std::mt19937 bits(seed);
    for (int64_t i = 0; i < n_; ++i) {
      if (bits() % 7 == 0) put(data(), dtype_, i, hard[bits() % std::size(hard)]);
    }
    return *this;
  }

  // Equal bits everywhere, the surroundings included; two NaNs count as equal unless `exact`.
  void expect_same(const Buffer& expected, bool exact = false) const {
    if (bytes_ == expected.bytes_) return;
    for (size_t b = 0; b < bytes_.size(); ++b) {
      const int64_t i = (static_cast<int64_t>(b) - offset_) / static_cast<int64_t>(size_of(dtype_));
      const bool inside = static_cast<int64_t>(b) >= offset_ && i < n_;
      if (bytes_[b] == expected.bytes_[b]) continue;
      if (inside && !exact && std::isnan(at(i)) && std::isnan(expected.at(i))) continue;
      ASSERT_TRUE(inside) << "wrote outside of the range, byte " << b;
      ADD_FAILURE() << "element " << i << " of " << n_ << ": " << at(i) << " is not " << expected.at(i);
      return;
    }
  }

 private:
  DType dtype_;
  int64_t n_;
  int64_t offset_;
  std::vector<uint8_t> bytes_;
};

}  // namespace tessera::kernels::testing

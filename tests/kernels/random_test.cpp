// The random bits: pinned values, and the statistics that rounding relies on. Bounds are five standard deviations, and
// keys are fixed, so a pass is a pass.
#include "tessera/kernels/random.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

namespace tessera::kernels {
namespace {

constexpr int kDraws = 1 << 20;
const double kSigma = std::sqrt(static_cast<double>(kDraws));

BlockKey key_at(RandomKey key, uint64_t element) {
  key.first = element;
  return block_key(key);
}
// The word of elements 2 * index and 2 * index + 1.
uint32_t word(const RandomKey& key, Stream stream, uint64_t index) {
  return stream_word(root_word(key_at(key, 2 * index), static_cast<uint32_t>(index)), stream);
}

const RandomKey kKeys[] = {{0, 0, 0}, {0, 1, 0}, {1, 0, 0}, {42, 1000, 0}, {0xffffffffffffffffu, 12345, 0}};

// A run that is repeated has to give the same weights, whatever the version or device.
TEST(Random, PinnedBits) {
  EXPECT_EQ(random_bits(key_at({0, 0, 0}, 0), kState0, 0), 0xe78bu);
  EXPECT_EQ(random_bits(key_at({0, 0, 0}, 1), kState0, 1), 0x0c6du);
  EXPECT_EQ(random_bits(key_at({0, 0, 0}, 1), kGradient, 1), 0x7378u);
  EXPECT_EQ(random_bits(key_at({42, 7, 0}, 123456789), kState1, 123456789), 0x70d4u);
  EXPECT_EQ(random_bits(key_at({42, 7, 0}, (uint64_t{3} << 33) + 6), kWeight, (uint64_t{3} << 33) + 6), 0x185au);
}

TEST(Random, KeysHoldForAllElementsOfABlock) {
  const RandomKey key{9, 4, (uint64_t{1} << 33) - 3};
  std::vector<int64_t> bounds;
  for_each_block(key, 6, [&](int64_t begin, int64_t end, BlockKey block) {
    bounds.insert(bounds.end(), {begin, end});
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t element = key.first + static_cast<uint64_t>(i);
      EXPECT_EQ(random_bits(block, kWeight, element), random_bits(key_at(key, element), kWeight, element));
    }
  });
  EXPECT_EQ(bounds, (std::vector<int64_t>{0, 3, 3, 6}));
}

TEST(Random, EveryBitIsBalanced) {
  for (const RandomKey& key : kKeys) {
    for (Stream stream : {kState0, kState1, kWeight, kGradient}) {
      std::array<int, 32> ones{};
      for (int e = 0; e < kDraws; ++e) {
        const uint32_t w = word(key, stream, e);
        for (int bit = 0; bit < 32; ++bit)
          ones[bit] += (w >> bit) & 1;
      }
      for (int bit = 0; bit < 32; ++bit)
        EXPECT_LT(std::fabs(ones[bit] - kDraws / 2), 5 * kSigma / 2) << bit;
    }
  }
}

TEST(Random, BitsAreUniform) {
  for (const RandomKey& key : kKeys) {
    for (int shift : {0, 8, 16, 24}) {
      std::array<double, 256> counts{};
      for (int e = 0; e < kDraws; ++e)
        ++counts[(word(key, kState1, e) >> shift) & 0xff];
      double chi = 0;
      for (double count : counts)
        chi += (count - kDraws / 256.0) * (count - kDraws / 256.0) / (kDraws / 256.0);
      EXPECT_LT(std::fabs(chi - 255), 5 * std::sqrt(2 * 255.0));
    }
  }
}

// Two sequences of words: no bit of one is like a bit of the other, and as numbers they do not correlate.
void expect_independent(const char* what, const std::function<uint32_t(int)>& a,
                        const std::function<uint32_t(int)>& b) {
  constexpr int kShifts[] = {0, 1, 7, 16, 25};
  std::array<std::array<int, 32>, std::size(kShifts)> equal{};
  double low = 0, upper = 0, crossed = 0;
  const auto centred = [](uint32_t bits) { return (bits - 32767.5) / 65536 * std::sqrt(12.0); };
  for (int e = 0; e < kDraws; ++e) {
    const uint32_t x = a(e), y = b(e);
    for (size_t s = 0; s < std::size(kShifts); ++s) {
      const uint32_t same = ~(x ^ std::rotl(y, kShifts[s]));
      for (int bit = 0; bit < 32; ++bit)
        equal[s][bit] += static_cast<int>((same >> bit) & 1);
    }
    low += centred(x & 0xffff) * centred(y & 0xffff);
    upper += centred(x >> 16) * centred(y >> 16);
    crossed += centred(x & 0xffff) * centred(y >> 16);
  }
  for (const auto& row : equal) {
    for (int count : row)
      EXPECT_LT(std::fabs(count - kDraws / 2), 5 * kSigma / 2) << what;
  }
  for (double sum : {low, upper, crossed})
    EXPECT_LT(std::fabs(sum), 5 * kSigma) << what;
}

TEST(Random, NeighboursAreIndependent) {
  const RandomKey key{7, 100, 0}, next_step{7, 101, 0}, next_seed{8, 100, 0};
  const auto plain = [&](int e) { return word(key, kState0, e); };
  for (uint64_t distance :
       {uint64_t{1}, uint64_t{2}, uint64_t{16}, uint64_t{4096}, uint64_t{1} << 31, uint64_t{1} << 32})
    expect_independent("elements", plain, [&](int e) { return word(key, kState0, e + distance); });
  expect_independent("steps", plain, [&](int e) { return word(next_step, kState0, e); });
  expect_independent("seeds", plain, [&](int e) { return word(next_seed, kState0, e); });
  // One element over the steps, beside its neighbour and its own next step.
  const auto at = [](uint64_t step, uint64_t index) { return word({1, step, 0}, kWeight, index); };
  expect_independent("an element's steps", [&](int e) { return at(e, 5); }, [&](int e) { return at(e, 6); });
  expect_independent("an element's next step", [&](int e) { return at(e, 5); }, [&](int e) { return at(e + 1, 5); });
}

TEST(Random, StreamsAreIndependent) {
  const RandomKey key{7, 100, 0};
  const Stream streams[] = {kState0, kState1, kWeight, kGradient};
  for (int a = 0; a < 4; ++a) {
    for (int b = a + 1; b < 4; ++b) {
      for (int distance : {0, 1}) {
        expect_independent(
            "streams", [&](int e) { return word(key, streams[a], e); },
            [&](int e) { return word(key, streams[b], e + distance); });
      }
    }
  }
}

TEST(Random, TheElementsOfAWordAreIndependent) {
  double sum = 0;
  for (int e = 0; e < kDraws; ++e) {
    const uint32_t w = word({3, 1, 0}, kWeight, e);
    sum += ((w & 0xffff) - 32767.5) * ((w >> 16) - 32767.5) * 12 / 65536 / 65536;
  }
  EXPECT_LT(std::fabs(sum), 5 * kSigma);
}

}  // namespace
}  // namespace tessera::kernels

// The random bits: pinned values, and the statistics that rounding relies on. Bounds are five standard deviations, and
// keys are fixed, so a pass is a pass.
#include "tessera/kernels/random.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <string>

namespace tessera::kernels {
namespace {

constexpr int kDraws = 1 << 20;
const double kSigma = std::sqrt(static_cast<double>(kDraws));

uint32_t word(const RandomKey& key, uint64_t pair, uint64_t element) {
  return random_word(pair_key(key, pair, element), static_cast<uint32_t>(element));
}

const RandomKey kKeys[] = {{0, 0, 0}, {0, 1, 0}, {1, 0, 0}, {42, 1000, 0}, {0xffffffffffffffffu, 12345, 0}};

// A run that is repeated has to give the same weights, whatever the version or device.
TEST(Random, PinnedWords) {
  EXPECT_EQ(word({0, 0, 0}, 0, 0), 0x0c6de78bu);
  EXPECT_EQ(word({0, 0, 0}, 1, 0), 0xab9234beu);
  EXPECT_EQ(word({42, 7, 0}, 0, 123456789), 0xf136b132u);
  EXPECT_EQ(word({42, 7, 0}, 1, (uint64_t{3} << 32) + 5), 0x531686acu);
}

TEST(Random, KeysOfAStepHoldForAllItsElements) {
  const RandomKey key{9, 4, (uint64_t{1} << 32) - 2};
  std::string parts;
  for_each_streams(key, 5, [&](int64_t begin, int64_t end, const RandomStreams& streams) {
    parts += std::to_string(begin) + "-" + std::to_string(end) + " ";
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t element = key.first + static_cast<uint64_t>(i);
      EXPECT_EQ(random_word(streams.states, static_cast<uint32_t>(element)), word(key, 0, element));
      EXPECT_EQ(random_word(streams.weights, static_cast<uint32_t>(element)), word(key, 1, element));
    }
  });
  EXPECT_EQ(parts, "0-2 2-5 ");
}

TEST(Random, EveryBitIsBalanced) {
  for (const RandomKey& key : kKeys) {
    for (uint64_t pair : {0, 1}) {
      std::array<int, 32> ones{};
      for (int e = 0; e < kDraws; ++e) {
        const uint32_t w = word(key, pair, e);
        for (int bit = 0; bit < 32; ++bit)
          ones[bit] += (w >> bit) & 1;
      }
      for (int bit = 0; bit < 32; ++bit)
        EXPECT_LT(std::fabs(ones[bit] - kDraws / 2), 5 * kSigma / 2) << bit;
    }
  }
}

TEST(Random, StreamsAreUniform) {
  for (const RandomKey& key : kKeys) {
    for (int shift : {0, 8, 16, 24}) {
      std::array<double, 256> counts{};
      for (int e = 0; e < kDraws; ++e)
        ++counts[(word(key, 0, e) >> shift) & 0xff];
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
  const auto centred = [](uint32_t stream) { return (stream - 32767.5) / 65536 * std::sqrt(12.0); };
  for (int e = 0; e < kDraws; ++e) {
    const uint32_t x = a(e), y = b(e);
    for (size_t s = 0; s < std::size(kShifts); ++s) {
      const uint32_t same = ~(x ^ std::rotl(y, kShifts[s]));
      for (int bit = 0; bit < 32; ++bit)
        equal[s][bit] += static_cast<int>((same >> bit) & 1);
    }
    low += centred(low_stream(x)) * centred(low_stream(y));
    upper += centred(upper_stream(x)) * centred(upper_stream(y));
    crossed += centred(low_stream(x)) * centred(upper_stream(y));
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
  const auto plain = [&](int e) { return word(key, 0, e); };
  for (uint64_t distance :
       {uint64_t{1}, uint64_t{2}, uint64_t{16}, uint64_t{4096}, uint64_t{1} << 31, uint64_t{1} << 32})
    expect_independent("elements", plain, [&](int e) { return word(key, 0, e + distance); });
  expect_independent("steps", plain, [&](int e) { return word(next_step, 0, e); });
  expect_independent("seeds", plain, [&](int e) { return word(next_seed, 0, e); });
  expect_independent("pairs", plain, [&](int e) { return word(key, 1, e); });
  // One element over the steps, beside its neighbour.
  expect_independent(
      "an element's steps", [](int e) { return word({1, static_cast<uint64_t>(e), 0}, 0, 5); },
      [](int e) { return word({1, static_cast<uint64_t>(e), 0}, 0, 6); });
  expect_independent(
      "an element's next step", [](int e) { return word({1, static_cast<uint64_t>(e), 0}, 0, 5); },
      [](int e) { return word({1, static_cast<uint64_t>(e) + 1, 0}, 0, 5); });
}

TEST(Random, TheStreamsOfAWordAreIndependent) {
  double sum = 0;
  for (int e = 0; e < kDraws; ++e) {
    const uint32_t w = word({3, 1, 0}, 0, e);
    sum += (low_stream(w) - 32767.5) * (upper_stream(w) - 32767.5) * 12 / 65536 / 65536;
  }
  EXPECT_LT(std::fabs(sum), 5 * kSigma);
}

}  // namespace
}  // namespace tessera::kernels

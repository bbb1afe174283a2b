// The random bits: pinned values, and the statistics that rounding relies on. Bounds are five standard deviations, and
// keys are fixed, so a pass is a pass.
#include "tessera/kernels/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

namespace tessera::kernels {
namespace {

constexpr int kDraws = 1 << 21;
const double kSigma = std::sqrt(static_cast<double>(kDraws));

// The word of elements 4 * index to 4 * index + 3.
uint64_t word(const RandomKey& key, Stream stream, uint64_t index) {
  return stream_word(root_of(step_key(key), index), stream);
}

const RandomKey kKeys[] = {{0, 0, 0}, {0, 1, 0}, {1, 0, 0}, {42, 1000, 0}, {0xffffffffffffffffu, 12345, 0}};
constexpr Stream kStreams[] = {kState0, kState1, kWeight, kGradient};

// A run that is repeated has to give the same weights, whatever the version or device.
TEST(Random, PinnedBits) {
  EXPECT_EQ(random_bits(step_key({0, 0, 0}), kState0, 0), 37462u);
  EXPECT_EQ(random_bits(step_key({0, 0, 0}), kState0, 1), 12694u);
  EXPECT_EQ(random_bits(step_key({0, 0, 0}), kGradient, 3), 63205u);
  EXPECT_EQ(random_bits(step_key({42, 7, 0}), kState1, 123456790), 59037u);
  EXPECT_EQ(random_bits(step_key({42, 7, 0}), kWeight, (uint64_t{3} << 35) + 6), 55609u);
}

TEST(Random, ElementsAreTheQuartersOfAWord) {
  const RandomKey key{9, 4, 0};
  for (uint64_t index : {uint64_t{0}, uint64_t{5}, uint64_t{1} << 40}) {
    for (uint64_t i = 0; i < 4; ++i)
      EXPECT_EQ(random_bits(step_key(key), kWeight, 4 * index + i), (~word(key, kWeight, index) >> (16 * i)) & 0xffff);
  }
}

// How often each bit was set: eight counters to a word, emptied before they overflow.
class BitCounts {
 public:
  void add(uint64_t word) {
    for (int j = 0; j < 8; ++j)
      parts_[j] += (word >> j) & 0x0101010101010101u;
    if (++pending_ == 255) flush();
  }
  // In standard deviations from half of `draws`; the greatest of all bits.
  double worst(double draws) {
    flush();
    double far = 0;
    for (int count : totals_)
      far = std::max(far, std::fabs(count - draws / 2) / (std::sqrt(draws) / 2));
    return far;
  }

 private:
  void flush() {
    for (int j = 0; j < 8; ++j) {
      for (int byte = 0; byte < 8; ++byte)
        totals_[8 * byte + j] += static_cast<int>((parts_[j] >> (8 * byte)) & 0xff);
      parts_[j] = 0;
    }
    pending_ = 0;
  }
  std::array<uint64_t, 8> parts_{};
  std::array<int, 64> totals_{};
  int pending_ = 0;
};

TEST(Random, EveryBitIsBalanced) {
  for (const RandomKey& key : kKeys) {
    for (Stream stream : kStreams) {
      BitCounts ones;
      for (int e = 0; e < kDraws; ++e)
        ones.add(word(key, stream, e));
      EXPECT_LT(ones.worst(kDraws), 5);
    }
  }
}

// How far counts of equally likely cells are from uniform, in standard deviations.
template <size_t cells>
double unevenness(const std::array<double, cells>& counts) {
  double chi = 0, each = 0;
  for (double count : counts)
    each += count / cells;
  for (double count : counts)
    chi += (count - each) * (count - each) / each;
  return std::fabs(chi - (cells - 1)) / std::sqrt(2.0 * (cells - 1));
}

TEST(Random, BitsAreUniform) {
  for (const RandomKey& key : kKeys) {
    for (Stream stream : kStreams) {
      for (int shift = 0; shift < 64; shift += 8) {
        std::array<double, 256> counts{};
        for (int e = 0; e < kDraws; ++e)
          ++counts[(word(key, stream, e) >> shift) & 0xff];
        EXPECT_LT(unevenness(counts), 5) << shift;
      }
    }
  }
}

// Two sequences of words: no bit of one is like a bit of the other, nor are a few bits of their elements, and as numbers the
// elements do not correlate.
void expect_independent(const char* what, const std::function<uint64_t(int)>& a,
                        const std::function<uint64_t(int)>& b) {
  constexpr int kTurns[] = {0, 1, 7, 8, 16, 24, 32, 40, 48, 57};
  std::array<BitCounts, std::size(kTurns)> equal;
  std::array<std::array<double, 256>, 4> low{}, high{}, difference{};
  std::array<std::array<double, 4>, 4> products{};
  const auto part = [](uint64_t word, int i) { return static_cast<uint32_t>(word >> (16 * i)) & 0xffffu; };
  const auto centred = [](uint32_t bits) { return (bits - 32767.5) / 65536 * std::sqrt(12.0); };
  for (int e = 0; e < kDraws; ++e) {
    const uint64_t x = a(e), y = b(e);
    for (size_t t = 0; t < std::size(kTurns); ++t)
      equal[t].add(x ^ std::rotl(y, kTurns[t]));
    for (int i = 0; i < 4; ++i) {
      const uint32_t u = part(x, i), v = part(y, i);
      ++low[i][(u & 15) << 4 | (v & 15)];
      ++high[i][u >> 12 << 4 | v >> 12];
      ++difference[i][((u - v) & 0xffff) >> 8];
      for (int j = 0; j < 4; ++j)
        products[i][j] += centred(u) * centred(part(y, j));
    }
  }
  for (BitCounts& counts : equal)
    EXPECT_LT(counts.worst(kDraws), 5) << what;
  for (int i = 0; i < 4; ++i) {
    EXPECT_LT(unevenness(low[i]), 5) << what;
    EXPECT_LT(unevenness(high[i]), 5) << what;
    EXPECT_LT(unevenness(difference[i]), 5) << what;
    for (double sum : products[i])
      EXPECT_LT(std::fabs(sum), 5 * kSigma) << what;
  }
}

TEST(Random, StepsAndSeedsAreIndependent) {
  const RandomKey key{7, 100, 0}, next_step{7, 101, 0}, next_seed{8, 100, 0};
  const auto plain = [&](int e) { return word(key, kState0, e); };
  expect_independent("steps", plain, [&](int e) { return word(next_step, kState0, e); });
  expect_independent("seeds", plain, [&](int e) { return word(next_seed, kState0, e); });
  // One element over the steps, beside its neighbour and its own next step.
  const auto at = [](uint64_t step, uint64_t index) { return word({1, step, 0}, kWeight, index); };
  expect_independent("an element's steps", [&](int e) { return at(e, 5); }, [&](int e) { return at(e, 6); });
  expect_independent("an element's next step", [&](int e) { return at(e, 5); }, [&](int e) { return at(e + 1, 5); });
}

// Weak mixers show at a few distances of a few streams only: without the second product, 4, 32 and 2048 words.
TEST(Random, WordsAtADistanceAreIndependent) {
  const RandomKey key{7, 100, 0};
  for (Stream stream : kStreams) {
    for (int power : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 17, 20, 24, 28, 31, 32, 34, 38}) {
      expect_independent(
          "words", [&](int e) { return word(key, stream, e); },
          [&](int e) { return word(key, stream, e + (uint64_t{1} << power)); });
    }
  }
}

TEST(Random, StreamsAreIndependent) {
  const RandomKey key{7, 100, 0};
  for (int a = 0; a < 4; ++a) {
    for (int b = a + 1; b < 4; ++b) {
      for (int distance : {0, 1}) {
        expect_independent(
            "streams", [&](int e) { return word(key, kStreams[a], e); },
            [&](int e) { return word(key, kStreams[b], e + distance); });
      }
    }
  }
}

TEST(Random, TheBitsOfAWordAreIndependent) {
  for (Stream stream : kStreams) {
    std::array<BitCounts, 33> equal;
    for (int e = 0; e < kDraws; ++e) {
      const uint64_t x = word({3, 1, 0}, stream, e);
      for (int turn = 1; turn <= 32; ++turn)
        equal[turn].add(x ^ std::rotl(x, turn));
    }
    for (int turn = 1; turn <= 32; ++turn)
      EXPECT_LT(equal[turn].worst(kDraws), 5) << turn;
  }
}

}  // namespace
}  // namespace tessera::kernels

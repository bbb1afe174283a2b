// Random bits by counter: a function of (seed, step, stream, global element index), the same on every processor.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// Note [Random bits]
// The word of element e for a pair of streams is, in 32-bit arithmetic with a = low half of e,
//   x = a + key.before;   x ^= x >> 17;  x *= 0xed5ad4bb;  x ^= x >> 11;
//   x += key.between;     x *= 0xac4c1b51;  x ^= x >> 15;  x *= 0x31848bab;  x ^= x >> 14
// and feeds two streams of 16 bits. Shifts and factors are triple32, a mixer that was searched for low bias
// (hash-prospector, public domain); one with two multiplications showed correlations between elements at distances that
// are powers of two. The second key inside keeps the sequences of two steps from being shifts of each other. The 64 key
// bits come from (seed, step, pair, upper half of e) by three rounds of the finalizer of SplitMix64 (Steele, Lea &
// Flood, OOPSLA 2014; constants of Stafford's Mix13).
// Good for rounding, where a bias would have to line up with the data over many steps; not for secrets.
struct PairKey {
  uint32_t before = 0;
  uint32_t between = 0;
};

// The keys of 2^32 elements, those whose indices share their upper half.
struct RandomStreams {
  PairKey states;   // low half of a word: state 0; upper half: state 1
  PairKey weights;  // low half: weight; upper half: gradient
};

TESSERA_ELEMENT uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

TESSERA_ELEMENT PairKey pair_key(const RandomKey& key, uint64_t pair, uint64_t element) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  uint64_t x = mix64(key.seed + kGolden);
  x = mix64(x + key.step + kGolden);
  x = mix64(x + ((element >> 32) * 2 + pair) + kGolden);
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

TESSERA_ELEMENT RandomStreams random_streams(const RandomKey& key) {
  return {pair_key(key, 0, key.first), pair_key(key, 1, key.first)};
}

TESSERA_ELEMENT uint32_t random_word(PairKey key, uint32_t element) {
  uint32_t x = element + key.before;
  x ^= x >> 17;
  x *= 0xed5ad4bbu;
  x ^= x >> 11;
  x += key.between;
  x *= 0xac4c1b51u;
  x ^= x >> 15;
  x *= 0x31848babu;
  x ^= x >> 14;
  return x;
}

TESSERA_ELEMENT uint32_t low_stream(uint32_t word) {
  return word & 0xffffu;
}
TESSERA_ELEMENT uint32_t upper_stream(uint32_t word) {
  return word >> 16;
}

// call(begin, end, streams) for the parts of [0, n) whose elements share their streams.
template <class Call>
TESSERA_ELEMENT void for_each_streams(const RandomKey& random, int64_t n, const Call& call) {
  for (int64_t begin = 0; begin < n;) {
    RandomKey here = random;
    here.first += static_cast<uint64_t>(begin);
    const uint64_t left = (uint64_t{1} << 32) - (here.first & 0xffffffffu);
    const int64_t end = left < static_cast<uint64_t>(n - begin) ? begin + static_cast<int64_t>(left) : n;
    call(begin, end, random_streams(here));
    begin = end;
  }
}

}  // namespace tessera::kernels

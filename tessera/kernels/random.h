// Random bits by counter: a function of (seed, step, stream, global element index), the same on every processor.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// Note [Random bits]
// The word of element e for a pair of streams is, in 32-bit arithmetic with a = low half of e,
//   x = a + key.before;  x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x += key.between;  x *= 0xd35a2d97;
//   x ^= x >> 15
// and feeds two streams of 16 bits. Shifts and factors are a mixer that was searched for low bias (hash-prospector,
// public domain); each key sits in front of one of its two rounds, so that the sequences of two keys are not shifts of
// each other. The 64 key bits come from (seed, step, pair, upper half of e) by three rounds of the finalizer of
// SplitMix64 (Steele, Lea & Flood, OOPSLA 2014; constants of Stafford's Mix13).
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
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= x >> 15;
  x += key.between;
  x *= 0xd35a2d97u;
  x ^= x >> 15;
  return x;
}

TESSERA_ELEMENT uint32_t low_stream(uint32_t word) {
  return word & 0xffffu;
}
TESSERA_ELEMENT uint32_t upper_stream(uint32_t word) {
  return word >> 16;
}

// Elements of a range of `n` that share the streams of its first element: up to where the upper half of their index
// changes.
TESSERA_ELEMENT int64_t same_streams(const RandomKey& key, int64_t n) {
  const uint64_t left = (uint64_t{1} << 32) - (key.first & 0xffffffffu);
  return static_cast<uint64_t>(n) < left ? n : static_cast<int64_t>(left);
}

TESSERA_ELEMENT RandomKey advanced(RandomKey key, int64_t elements) {
  key.first += static_cast<uint64_t>(elements);
  return key;
}

}  // namespace tessera::kernels

// Random bits by counter: a function of (seed, step, stream, global element index), the same on every processor.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// Note [Random bits]
// A stream has 16 bits for every element e: of the word of e / 2, the low half for even e, the upper half for odd e.
// The word of index a is, in 32-bit arithmetic,
//   x = a + key.before;   x ^= x >> 17;  x *= 0xed5ad4bb;  x ^= x >> 11;
//   x += key.between;     x *= 0xac4c1b51;  x ^= x >> 15;  x *= 0x31848bab;  x ^= x >> 14
// Shifts and factors are triple32, a mixer that was searched for low bias (hash-prospector, public domain); one with
// two multiplications showed correlations between elements at distances that are powers of two. The second key inside
// keeps the sequences of two steps from being shifts of each other. The 64 key bits come from seed, step, and stream
// with the upper half of a, by three rounds of the finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014; constants
// of Stafford's Mix13).
// Good for rounding, where a bias would have to line up with the data over many steps; not for secrets.
struct StreamKey {
  uint32_t before = 0;
  uint32_t between = 0;
};

// The keys of 2^33 elements, those whose words share the upper half of their index.
struct RandomStreams {
  StreamKey state0, state1, weight, gradient;
};

TESSERA_ELEMENT uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

TESSERA_ELEMENT StreamKey stream_key(const RandomKey& key, uint64_t stream) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  uint64_t x = mix64(key.seed + kGolden);
  x = mix64(x + key.step + kGolden);
  x = mix64(x + (key.first >> 33) * 4 + stream + kGolden);
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

TESSERA_ELEMENT RandomStreams random_streams(const RandomKey& key) {
  return {stream_key(key, 0), stream_key(key, 1), stream_key(key, 2), stream_key(key, 3)};
}

TESSERA_ELEMENT uint32_t random_word(StreamKey key, uint32_t index) {
  uint32_t x = index + key.before;
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

// The 16 bits of an element.
TESSERA_ELEMENT uint32_t random_bits(StreamKey key, uint64_t element) {
  const uint32_t word = random_word(key, static_cast<uint32_t>(element >> 1));
  return (element & 1) != 0 ? word >> 16 : word & 0xffffu;
}

// call(begin, end, streams) for the parts of [0, n) whose elements share their streams.
template <class Call>
TESSERA_ELEMENT void for_each_streams(const RandomKey& random, int64_t n, const Call& call) {
  for (int64_t begin = 0; begin < n;) {
    RandomKey here = random;
    here.first += static_cast<uint64_t>(begin);
    const uint64_t left = (uint64_t{1} << 33) - (here.first & 0x1ffffffffu);
    const int64_t end = left < static_cast<uint64_t>(n - begin) ? begin + static_cast<int64_t>(left) : n;
    call(begin, end, random_streams(here));
    begin = end;
  }
}

}  // namespace tessera::kernels

// Random bits by counter: a function of (seed, step, stream, global element index), the same on every processor.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// Note [Random bits]
// A stream has 16 bits for every element e: of the word of e / 2, the low half for even e, the upper half for odd e.
// The word of index a is, in 32-bit arithmetic,
//   x = a + key.before;   x ^= x >> 17;  x *= 0xed5ad4bb;  x ^= x >> 11;
//   x += key.between;     x *= 0xac4c1b51;  x ^= x >> 15;       (root_word, for all streams)
//   x *= stream's factor;  x ^= x >> 14                          (stream_word)
// Shifts and factors are triple32, a mixer that was searched for low bias (hash-prospector, public domain); each stream
// has a last factor of its own. One with two multiplications in all showed correlations between elements at distances
// that are powers of two. The second key inside keeps the sequences of two steps from being shifts of each other. The 64
// key bits come from seed, step and the upper half of a, by three rounds of the finalizer of SplitMix64 (Steele, Lea &
// Flood, OOPSLA 2014; constants of Stafford's Mix13).
// Good for rounding, where a bias would have to line up with the data over many steps; not for secrets.
enum Stream : uint32_t {  // last factors
  kState0 = 0x31848babu,
  kState1 = 0x19c89935u,
  kWeight = 0x3e06b66bu,
  kGradient = 0x9d48a33bu,
};

// The key of 2^33 elements, those whose words share the upper half of their index.
struct BlockKey {
  uint32_t before = 0;
  uint32_t between = 0;
};

TESSERA_ELEMENT uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The key of element key.first.
TESSERA_ELEMENT BlockKey block_key(const RandomKey& key) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  uint64_t x = mix64(key.seed + kGolden);
  x = mix64(x + key.step + kGolden);
  x = mix64(x + (key.first >> 33) + kGolden);
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

TESSERA_ELEMENT uint32_t root_word(BlockKey key, uint32_t index) {
  uint32_t x = index + key.before;
  x ^= x >> 17;
  x *= 0xed5ad4bbu;
  x ^= x >> 11;
  x += key.between;
  x *= 0xac4c1b51u;
  return x ^ (x >> 15);
}

TESSERA_ELEMENT uint32_t stream_word(uint32_t root, Stream stream) {
  const uint32_t x = root * static_cast<uint32_t>(stream);
  return x ^ (x >> 14);
}

// The 16 bits of an element.
TESSERA_ELEMENT uint32_t random_bits(BlockKey key, Stream stream, uint64_t element) {
  const uint32_t word = stream_word(root_word(key, static_cast<uint32_t>(element >> 1)), stream);
  return (element & 1) != 0 ? word >> 16 : word & 0xffffu;
}

// call(begin, end, key) for the parts of [0, n) whose elements share their key.
template <class Call>
TESSERA_ELEMENT void for_each_block(const RandomKey& random, int64_t n, const Call& call) {
  for (int64_t begin = 0; begin < n;) {
    RandomKey here = random;
    here.first += static_cast<uint64_t>(begin);
    const uint64_t left = (uint64_t{1} << 33) - (here.first & 0x1ffffffffu);
    const int64_t end = left < static_cast<uint64_t>(n - begin) ? begin + static_cast<int64_t>(left) : n;
    call(begin, end, block_key(here));
    begin = end;
  }
}

}  // namespace tessera::kernels

// Random bits by counter: a function of (seed, step, stream, global element index), the same on every processor.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// Note [Random bits]
// Every stream has 16 bits for element e: those from 16 * (e % 4) on of the 64-bit word of index a = e / 4, which is
//   x = key.offset + a * kWeyl                        low(x), high(x): its halves, x >>> n: rotated
//   x = low(x) * high(x) ^ (x >>> 32) ^ key.mask
//   x = low(x) * high(x) ^ (x >>> 16)                 (root_word, for all streams)
//   x = low(x) * factor ^ (x >>> turn)                (stream_word; each stream has a factor and a turn of its own)
// All products are of 32 by 32 bits to 64, one instruction on vectors. Multiplying a number by itself, in part, is what
// makes a Weyl sequence random (B. Widynski, Middle-Square Weyl Sequence RNG, arXiv 1704.00358; Squares, arXiv
// 2004.06278). The rotated number makes up for the lowest and highest bits of products, which are not balanced; in the last
// two lines not by 32 or 0, which would put bits on those that they were made of. The key has 128 bits, so that the sequences
// of two steps are not shifts of each other.
// Good for rounding, where a bias would have to line up with the data over many steps; not for secrets.
enum Stream : uint8_t { kState0, kState1, kWeight, kGradient };

TESSERA_ELEMENT constexpr uint32_t factor_of(Stream stream) {
  return stream == kState0   ? 0xb1848babu
         : stream == kState1 ? 0x99c89935u
         : stream == kWeight ? 0xbe06b66bu
                             : 0x9d48a333u;
}
TESSERA_ELEMENT constexpr unsigned turn_of(Stream stream) {  // whole bytes
  return stream == kState0 ? 16 : stream == kState1 ? 24 : stream == kWeight ? 40 : 48;
}

constexpr uint64_t kWeyl = 0x9e3779b97f4a7c15u;  // 2^64 over the golden ratio

// The key of a seed and step.
struct StepKey {
  uint64_t offset = 0;
  uint64_t mask = 0;
};

// The finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014; constants of Stafford's Mix13).
TESSERA_ELEMENT uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

TESSERA_ELEMENT StepKey step_key(const RandomKey& key) {
  const uint64_t x = mix64(mix64(key.seed + kWeyl) + key.step + kWeyl);
  return {x, mix64(x + kWeyl)};
}

TESSERA_ELEMENT uint64_t rotated(uint64_t x, unsigned bits) {  // to the right, by 1 to 63
  return (x >> bits) | (x << (64 - bits));
}

TESSERA_ELEMENT uint64_t root_word(StepKey key, uint64_t index) {
  uint64_t x = key.offset + index * kWeyl;
  x = (x & 0xffffffffu) * (x >> 32) ^ rotated(x, 32) ^ key.mask;
  return (x & 0xffffffffu) * (x >> 32) ^ rotated(x, 16);
}

TESSERA_ELEMENT uint64_t stream_word(uint64_t root, Stream stream) {
  return (root & 0xffffffffu) * factor_of(stream) ^ rotated(root, turn_of(stream));
}

// The 16 bits of an element.
TESSERA_ELEMENT uint32_t random_bits(StepKey key, Stream stream, uint64_t element) {
  const uint64_t word = stream_word(root_word(key, element >> 2), stream);
  return static_cast<uint32_t>(word >> (16 * (element & 3))) & 0xffffu;
}

}  // namespace tessera::kernels

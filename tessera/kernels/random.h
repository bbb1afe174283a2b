// Random bits by counter: a function of (seed, step, stream, global element index), the same on every processor.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// Note [Random bits]
// Every stream has 16 bits for element e: those from bit 16 * (e % 4) on of its word of index a = e / 4, complemented (so that
// the word is the bound that vectors compare dropped bits with). For 64-bit x, low(x) and high(x) are the halves
// and x >>> n is x rotated to the right:
//   x = key.offset + a * kWeyl
//   x = low(x) * high(x) ^ (x >>> 32) ^ key.mask
//   s = low(x) * high(x) ^ (x >>> 16)            word of kState0
//       low(x) * high(x) ^ (x >>> 48)            word of kWeight
//       low(s) * factor ^ (s >>> turn)           words of kState1 and kGradient, by a signed product
// All products are of 32 by 32 bits to 64, one instruction on vectors. Multiplying a number by itself, in part, is what
// makes a Weyl sequence random (B. Widynski, Middle-Square Weyl Sequence RNG, arXiv 1704.00358; Squares, arXiv
// 2004.06278). The rotated number makes up for the lowest and highest bits of products, which are not balanced; in the last
// lines not by 32 or 0, which would put bits on those that they were made of. A product with a constant is signed since
// its highest bits are balanced then, so that even beside s itself it shows nothing. The key has 128 bits, so that the
// sequences of two steps are not shifts of each other.
// Good for rounding, where a bias would have to line up with the data over many steps; not for secrets.
enum Stream : uint8_t { kState0, kState1, kWeight, kGradient };

TESSERA_ELEMENT constexpr bool is_first(Stream stream) {  // whether its word is not made of another one
  return stream == kState0 || stream == kWeight;
}
TESSERA_ELEMENT constexpr int32_t factor_of(Stream stream) {  // of the other streams
  return stream == kState1 ? -0x663766cb : -0x62b75ccd;
}
TESSERA_ELEMENT constexpr unsigned turn_of(Stream stream) {
  return stream == kState0 || stream == kState1 ? 16 : 48;
}

constexpr uint64_t kWeyl = 0x9e3779b97f4a7c15u;  // 2^64 over the golden ratio

// The key of a seed and step.
struct StepKey {
  uint64_t offset = 0;
  uint64_t mask = 0;

  bool operator==(const StepKey&) const = default;
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

TESSERA_ELEMENT uint64_t product_of_halves(uint64_t x) {
  return (x & 0xffffffffu) * (x >> 32);
}

// What the words of all streams are made of.
struct Root {
  uint64_t x, product;
};

TESSERA_ELEMENT Root root_of(StepKey key, uint64_t index) {
  uint64_t x = key.offset + index * kWeyl;
  x = product_of_halves(x) ^ rotated(x, 32) ^ key.mask;
  return {x, product_of_halves(x)};
}

TESSERA_ELEMENT uint64_t stream_word(Root root, Stream stream) {
  if (is_first(stream)) return root.product ^ rotated(root.x, turn_of(stream));
  const uint64_t word = root.product ^ rotated(root.x, turn_of(kState0));
  const int64_t low = static_cast<int32_t>(word);
  return static_cast<uint64_t>(low * factor_of(stream)) ^ rotated(word, turn_of(stream));
}

// The 16 bits of an element.
TESSERA_ELEMENT uint32_t random_bits(StepKey key, Stream stream, uint64_t element) {
  const uint64_t word = stream_word(root_of(key, element >> 2), stream);
  return static_cast<uint32_t>(~word >> (16 * (element & 3))) & 0xffffu;
}

}  // namespace tessera::kernels

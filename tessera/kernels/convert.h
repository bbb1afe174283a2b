// Conversions of one element between fp32 and the 16-bit types, in plain integer arithmetic: what the kernels'
// conversions mean.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

TESSERA_ELEMENT float float_from_bf16(uint16_t half) {
  return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

TESSERA_ELEMENT bool is_nan(float value) {
  return value != value;
}

// Rounds to nearest even. `value` is not NaN.
TESSERA_ELEMENT uint16_t bf16_from_number(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Rounds to nearest even; a NaN stays a NaN (its quiet bit is set).
TESSERA_ELEMENT uint16_t bf16_from_float(float value) {
  if (is_nan(value)) return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) >> 16) | 0x40u);
  return bf16_from_number(value);
}

TESSERA_ELEMENT float float_from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (uint32_t{half} >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {  // zero or denormal: fraction * 2^-24 is exact
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  if (exponent == 31) {
    const uint32_t quiet = fraction != 0 ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13) | quiet);
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// Rounds to nearest even, to infinity from 65520 on. A NaN stays a NaN (its quiet bit is set).
TESSERA_ELEMENT uint16_t f16_from_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below half of the smallest
  if (magnitude >= 0x38800000u) {                                   // normal: drop 13 bits
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
  }
  // A denormal is the significand, shifted until its unit is 2^-24.
  const uint32_t shift = 126 - (magnitude >> 23);
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1);
  const bool up = rest > half || (rest == half && (kept & 1u) != 0);
  return static_cast<uint16_t>(sign | (kept + (up ? 1u : 0u)));
}

// Note [Stochastic rounding]
// `random` holds 16 random bits. They are added to the bits that rounding drops, so the magnitude goes up with the
// probability that the dropped part is of one unit: the mean is the value. A value that the type holds is never
// changed, and no finite value becomes infinite that nearest rounding keeps: above the largest finite value bf16 stays
// at that value, whose range is fp32's, and fp16, whose overflows loss scaling has to see, rounds to nearest. A NaN
// stays one.
// All 16 bits that bf16 drops take part. fp16 drops 13 (the lowest 3 random bits are not used), and more among denormals:
// there the value is first rounded to the nearest multiple of 2^-37 (2^-13 units), which 13 bits are left of. The smallest
// normal number is added for that, whose last place it is in fp32.
TESSERA_ELEMENT bool is_within_bf16(float value) {  // at most the largest finite value, and not NaN
  return std::fabs(value) <= std::bit_cast<float>(0x7f7f0000u);
}

// `value` is within bf16.
TESSERA_ELEMENT uint16_t bf16_stochastic_within(float value, uint32_t random) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + random) >> 16);
}

TESSERA_ELEMENT uint16_t bf16_stochastic(float value, uint32_t random) {
  if (is_nan(value)) return bf16_from_float(value);
  return bf16_stochastic_within(value, is_within_bf16(value) ? random : 0);
}

TESSERA_ELEMENT uint16_t f16_stochastic(float value, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x477fe000u) return f16_from_float(value);
  if (magnitude >= 0x38800000u) {  // normal
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + (random >> 3)) >> 13));
  }
  const auto sum = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p-14f);
  return static_cast<uint16_t>(sign | ((sum - 0x38800000u + (random >> 3)) >> 13));
}

// Note [Split master]
// An fp32 value as a bf16 weight and a 16-bit residual, exact for every finite value: `residual` is the low half and
// `weight` the upper half, rounded half-up (by magnitude), so a residual below zero (low half >= 0x8000) means "was
// rounded up", and adding it with its sign gives the bits back. By nearest even a tie could mean either. The weight is
// the nearest bf16 value; it differs from nearest even on exact ties only. Above the largest bf16 value the weight is
// infinite while both together are still finite. NaN keeps its upper half, quiet, with residual 0, so that the weight
// alone is NaN too. A weight that a user wrote stands beside the residual of the one before. Below a zero, which no split
// gives, it would lead to NaN, and counts as 0.
struct SplitFloat {
  uint16_t weight;
  uint16_t residual;
};

TESSERA_ELEMENT SplitFloat split_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (is_nan(value)) return {static_cast<uint16_t>((bits >> 16) | 0x40u), 0};
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<uint16_t>(bits)};
}

TESSERA_ELEMENT float join_float(SplitFloat halves) {
  const uint32_t low = halves.residual - ((halves.residual & 0x8000u) << 1);  // with its sign
  const bool below_zero = (halves.weight & 0x7fffu) == 0 && (halves.residual & 0x8000u) != 0;
  return std::bit_cast<float>((static_cast<uint32_t>(halves.weight) << 16) + (below_zero ? 0 : low));
}

}  // namespace tessera::kernels

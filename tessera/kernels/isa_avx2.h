// Vectors of 8 floats by AVX2, FMA and F16C. Everything here has internal linkage: only
// table_avx2.cpp may include it, and no function compiled with its flags may be merged with one of
// the baseline (see table.inc.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tessera::kernels {
namespace {

constexpr int kWidth = 8;
using F = __m256;                                     // floats
using D = __m256d;                                    // half as many doubles
using H = __m128i;                                    // 16-bit lanes
using U = uint32_t __attribute__((vector_size(32)));  // the bits of F
using W = uint64_t __attribute__((vector_size(32)));
using I = int32_t __attribute__((vector_size(32)));  // signed bits of F

inline F splat(float x) {
  return _mm256_set1_ps(x);
}
inline U constant(uint32_t x) {
  return U{} + x;
}
// On 64-bit lanes: first + lane * step; the products of the low halves, also of signed ones; x rotated to the right by
// whole bytes.
inline U count_from(uint64_t first, uint64_t step) {
  return (U)(W{0, 1, 2, 3} * step + first);
}
inline U product(U x, U y) {
  return (U)_mm256_mul_epu32((__m256i)x, (__m256i)y);
}
inline U signed_product(U x, U y) {
  return (U)_mm256_mul_epi32((__m256i)x, (__m256i)y);
}
template <int bits>
inline U rotated(U x) {
  using Bytes = uint8_t __attribute__((vector_size(32)));
  Bytes from;
  for (int i = 0; i < 32; ++i)
    from[i] = static_cast<uint8_t>(i / 8 * 8 + (i + bits / 8) % 8);
  return (U)_mm256_shuffle_epi8((__m256i)x, (__m256i)from);
}
inline F fma(F a, F b, F c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline D fma(D a, D b, D c) {
  return _mm256_fmadd_pd(a, b, c);
}
inline F square_root(F x) {
  return _mm256_sqrt_ps(x);
}
// y with the sign of x times its own; 0 where x is 0 or NaN.
inline F times_sign(F y, F x) {
  const F signs = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ);
  return _mm256_and_ps(signs, _mm256_xor_ps(y, _mm256_and_ps(x, splat(-0.0f))));
}
inline F widen_f16(H x) {
  return _mm256_cvtph_ps(x);
}
inline H narrow_f16(F x) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}
inline H cut_f16(F x) {  // towards zero
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_ZERO);
}
// Whether every 16-bit lane, without the sign, is `least` to `most`.
inline bool each_half_within(U x, uint16_t least, uint16_t most) {
  const __m256i above = _mm256_sub_epi16((__m256i)(x & 0x7fff7fffu), _mm256_set1_epi16(static_cast<int16_t>(least)));
  const __m256i below = _mm256_min_epu16(above, _mm256_set1_epi16(static_cast<int16_t>(most - least)));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi16(above, below)) == -1;
}
// The 16-bit lanes of `halves` in upper halves of lanes, above zeros: the first kWidth of them, or the others.
inline U first_uppers(U halves) {
  return (U)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)halves)) << 16;
}
inline U second_uppers(U halves) {
  return (U)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)halves, 1)) << 16;
}
// The upper halves of the lanes of `first`, then those of `second`; or the low ones.
inline U list_uppers(U first, U second) {
  return (U)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(first >> 16), (__m256i)(second >> 16)), 0xd8);
}
inline U list_lows(U first, U second) {
  return list_uppers(first << 16, second << 16);
}
// The upper halves of the lanes of `even` and `odd`, in turns, or the low ones.
inline U join_uppers(U even, U odd) {
  return (U)_mm256_blend_epi16((__m256i)(even >> 16), (__m256i)odd, 0xaa);
}
inline U join_lows(U even, U odd) {
  return (U)_mm256_blend_epi16((__m256i)even, (__m256i)(odd << 16), 0xaa);
}
// The bits of x where `mask` has ones, else those of y.
inline U select_bits(U mask, U x, U y) {
  return (x & mask) | (y & ~mask);
}
// For 16-bit lanes: upper + 1 where low > bound, else upper.
inline U carry_halves(U upper, U low, U bound) {
  const __m256i less = _mm256_cmpeq_epi16(_mm256_min_epu16((__m256i)low, (__m256i)bound), (__m256i)low);
  return (U)_mm256_add_epi16(_mm256_sub_epi16((__m256i)upper, _mm256_set1_epi16(-1)), less);
}
// For 16-bit lanes: upper + 1 where low > bound and the magnitude of `upper` is below `limit`, else upper.
inline U carry_halves(U upper, U low, U bound, U limit) {
  const __m256i less = _mm256_cmpeq_epi16(_mm256_min_epu16((__m256i)low, (__m256i)bound), (__m256i)low);
  const __m256i below = _mm256_cmpgt_epi16((__m256i)limit, (__m256i)(upper & 0x7fff7fffu));
  return (U)_mm256_sub_epi16((__m256i)upper, _mm256_andnot_si256(less, below));
}
// Turn two vectors of consecutive elements into those at even and at odd places, and back.
inline F even_of(F a, F b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
}
inline F odd_of(F a, F b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
inline F low_mix(F even, F odd) {
  return __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline F high_mix(F even, F odd) {
  return __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
}
inline D low_doubles(F x) {
  return _mm256_cvtps_pd(_mm256_castps256_ps128(x));
}
inline D high_doubles(F x) {
  return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}

}  // namespace
}  // namespace tessera::kernels

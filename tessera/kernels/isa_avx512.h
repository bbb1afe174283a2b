// Vectors of 16 floats by AVX-512. Everything here has internal linkage: only table_avx512.cpp may
// include it, and no function compiled with its flags may be merged with one of the baseline (see
// table.inc.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tessera::kernels {
namespace {

constexpr int kWidth = 16;
using F = __m512;                                     // floats
using D = __m512d;                                    // half as many doubles
using H = __m256i;                                    // 16-bit lanes
using U = uint32_t __attribute__((vector_size(64)));  // the bits of F
using W = uint64_t __attribute__((vector_size(64)));
using Halves32 = uint16_t __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));  // signed bits of F

inline F splat(float x) {
  return _mm512_set1_ps(x);
}
// Constants that stay where they are in a loop, in registers or memory: the compiler makes those that it knows anew each
// time, which takes one of the two units that shuffles, comparisons and half of the arithmetic wait for.
inline U constant(uint32_t x) {
  auto all = _mm512_set1_epi32(static_cast<int>(x));
  asm("" : "+v"(all));
  return (U)all;
}
inline __mmask64 constant_mask(uint64_t bits) {
  __mmask64 mask = bits;
  asm("" : "+k"(mask));
  return mask;
}
// On 64-bit lanes: first + lane * step; the products of the low halves, also of signed ones; x rotated to the right by
// whole bytes.
inline U count_from(uint64_t first, uint64_t step) {
  return (U)(W{0, 1, 2, 3, 4, 5, 6, 7} * step + first);
}
inline U product(U x, U y) {
  return (U)_mm512_mul_epu32((__m512i)x, (__m512i)y);
}
inline U signed_product(U x, U y) {
  return (U)_mm512_mul_epi32((__m512i)x, (__m512i)y);
}
template <int bits>
inline U rotated(U x) {
  return (U)_mm512_ror_epi64((__m512i)x, bits);
}
inline F fma(F a, F b, F c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline D fma(D a, D b, D c) {
  return _mm512_fmadd_pd(a, b, c);
}
inline F square_root(F x) {
  return _mm512_sqrt_ps(x);
}
// y with the sign of x times its own; 0 where x is 0 or NaN.
inline F times_sign(F y, F x) {
  const __mmask16 signs = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  return (F)_mm512_maskz_ternarylogic_epi32(signs, (__m512i)x, (__m512i)constant(0x80000000u), (__m512i)y, 0x6a);
}
inline F widen_f16(H x) {
  return _mm512_cvtph_ps(x);
}
inline H narrow_f16(F x) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}
inline H cut_f16(F x) {  // towards zero
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_ZERO);
}
// Whether every 16-bit lane, without the sign, is `least` to `most`.
inline bool each_half_within(U x, uint16_t least, uint16_t most) {
  const __m512i above = _mm512_sub_epi16((__m512i)(x & 0x7fff7fffu), (__m512i)constant(least * 0x10001u));
  return _mm512_cmpgt_epu16_mask(above, (__m512i)constant((most - least) * 0x10001u)) == 0;
}
// The 16-bit lanes of `halves` in upper halves of lanes, above zeros: the first kWidth of them, or the others.
inline U first_uppers(U halves) {
  const Halves32 from{0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                      0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  return (U)_mm512_maskz_permutexvar_epi16(constant_mask(0xaaaaaaaau), (__m512i)from, (__m512i)halves);
}
inline U second_uppers(U halves) {
  const Halves32 from{0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21, 0, 22, 0, 23,
                      0, 24, 0, 25, 0, 26, 0, 27, 0, 28, 0, 29, 0, 30, 0, 31};
  return (U)_mm512_maskz_permutexvar_epi16(constant_mask(0xaaaaaaaau), (__m512i)from, (__m512i)halves);
}
// The upper halves of the lanes of `first`, then those of `second`; or the low ones.
inline U list_uppers(U first, U second) {
  const Halves32 from{1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (U)_mm512_permutex2var_epi16((__m512i)first, (__m512i)from, (__m512i)second);
}
inline U list_lows(U first, U second) {
  const Halves32 from{0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                      32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  return (U)_mm512_permutex2var_epi16((__m512i)first, (__m512i)from, (__m512i)second);
}
// The upper halves of the lanes of `even` and `odd`, in turns, or the low ones.
inline U join_uppers(U even, U odd) {
  return (U)_mm512_mask_alignr_epi8((__m512i)odd, constant_mask(0x3333333333333333u), (__m512i)even, (__m512i)even, 2);
}
inline U join_lows(U even, U odd) {
  return (U)_mm512_mask_alignr_epi8((__m512i)even, constant_mask(0xccccccccccccccccu), (__m512i)odd, (__m512i)odd, 14);
}
// The bits of x where `mask` has ones, else those of y.
inline U select_bits(U mask, U x, U y) {
  return (U)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)x, (__m512i)y, 0xca);
}
// For 16-bit lanes: upper + 1 where low > bound, else upper.
inline U carry_halves(U upper, U low, U bound) {
  const __mmask32 carries = _mm512_cmpgt_epu16_mask((__m512i)low, (__m512i)bound);
  return (U)_mm512_mask_sub_epi16((__m512i)upper, carries, (__m512i)upper, (__m512i)constant(~0u));
}
// For 16-bit lanes: upper + 1 where low > bound and the magnitude of `upper` is below `limit`, else upper.
inline U carry_halves(U upper, U low, U bound, U limit) {
  const __mmask32 carries = _mm512_cmpgt_epu16_mask((__m512i)low, (__m512i)bound);
  const __mmask32 steps = _mm512_mask_cmplt_epu16_mask(carries, (__m512i)(upper & 0x7fff7fffu), (__m512i)limit);
  return (U)_mm512_mask_sub_epi16((__m512i)upper, steps, (__m512i)upper, (__m512i)constant(~0u));
}
// Turn two vectors of consecutive elements into those at even and at odd places, and back.
inline F even_of(F a, F b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline F odd_of(F a, F b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
inline F low_mix(F even, F odd) {
  return __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline F high_mix(F even, F odd) {
  return __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline D low_doubles(F x) {
  return _mm512_cvtps_pd(_mm512_castps512_ps256(x));
}
inline D high_doubles(F x) {
  return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}

}  // namespace
}  // namespace tessera::kernels

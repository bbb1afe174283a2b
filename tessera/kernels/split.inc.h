// Split master weights over vectors (Note [Split master] in convert.h).
#pragma once

#include "tessera/kernels/split.h"
#include "tessera/kernels/vec.inc.h"

namespace tessera::kernels {
namespace {

template <class Lanes>
TESSERA_INLINE F join_vector(const void* weight, const void* residual, int64_t i, Lanes lanes) {
  const U upper = widen_u16(Bf16::read<H>(weight, i, lanes));
  const U low = widen_u16(Bf16::read<H>(residual, i, lanes));
  return (F)((upper << 16) + (low - ((low & 0x8000u) << 1)));
}

template <class Lanes>
TESSERA_INLINE void split_vector(void* weight, void* residual, int64_t i, Lanes lanes, F x) {
  const U bits = (U)x, zero{};
  const auto nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const U quiet = (bits >> 16) | 0x40u;
  Bf16::write(weight, i, lanes, narrow_u16(nan ? quiet : (bits + 0x8000u) >> 16));
  Bf16::write(residual, i, lanes, narrow_u16(nan ? zero : bits & 0xffffu));
}

void split_any(void* weight, void* residual, const float* src, int64_t n) {
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    F32::prefetch(src, i);
    Bf16::prefetch(weight, i);
    Bf16::prefetch(residual, i);
  };
  for_each_vector(n, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    split_vector(weight, residual, i, lanes, F32::load(src, i, lanes));
  });
}

void join_any(float* dst, const void* weight, const void* residual, int64_t n) {
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    Bf16::prefetch(weight, i);
    Bf16::prefetch(residual, i);
    F32::prefetch(dst, i);
  };
  for_each_vector(n, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    F32::store(dst, i, lanes, join_vector(weight, residual, i, lanes));
  });
}

}  // namespace
}  // namespace tessera::kernels

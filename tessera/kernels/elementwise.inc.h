// Element-wise passes over vectors. The arithmetic and its order are those of reference.cpp, so the
// bits are too.
#pragma once

#include "tessera/kernels/elementwise.h"
#include "tessera/kernels/vec.inc.h"

namespace tessera::kernels {
namespace {

template <class Dst, class Src>
void copy_typed(void* dst, const void* src, float factor, int64_t n) {
  const F scale = splat(factor);
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    Src::prefetch(src, i);
    Dst::prefetch(dst, i);
  };
  for_each_vector(n, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    Dst::store(dst, i, lanes, Src::load(src, i, lanes) * scale);
  });
}

template <class Dst, class Src>
void add_typed(void* dst, const void* src, float factor, int64_t n) {
  const F scale = splat(factor);
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    Src::prefetch(src, i);
    Dst::prefetch(dst, i);
  };
  for_each_vector(n, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    Dst::store(dst, i, lanes, fma(scale, Src::load(src, i, lanes), Dst::load(dst, i, lanes)));
  });
}

// Loads and stores alone keep every bit. Prefetching makes this faster than memcpy on large ranges.
void copy_bits(void* dst, const void* src, int64_t bytes) {
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    F32::prefetch(src, i);
    F32::prefetch(dst, i);
  };
  for_each_vector(bytes / 4, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    F32::store(dst, i, lanes, F32::load(src, i, lanes));
  });
  if (bytes % 4 == 0) return;
  const int64_t done = bytes / 4 * 4;
  memcpy(static_cast<char*>(dst) + done, static_cast<const char*>(src) + done, bytes % 4);
}

void scaled_copy_any(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n) {
  if (scale == 1.0f && dst_dtype == src_dtype) {
    if (dst != src) copy_bits(dst, src, n * static_cast<int64_t>(size_of(dst_dtype)));
    return;
  }
  with_type(dst_dtype, [&](auto to) {
    with_type(src_dtype, [&](auto from) { copy_typed<decltype(to), decltype(from)>(dst, src, scale, n); });
  });
}

void scaled_add_any(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n) {
  with_type(dst_dtype, [&](auto to) {
    with_type(src_dtype, [&](auto from) { add_typed<decltype(to), decltype(from)>(dst, src, scale, n); });
  });
}

// Lane l of the contract is lane l % (kWidth / 2) of sums[l / (kWidth / 2)].
template <class Type>
double sum_of_squares_typed(const void* src, int64_t n) {
  constexpr int64_t kLanes = 16, kVectors = kLanes / kWidth;
  D sums[2 * kVectors] = {};
  const auto add = [&](int64_t v, F x) __attribute__((always_inline)) {
    const D low = low_doubles(x), high = high_doubles(x);
    sums[2 * v] = fma(low, low, sums[2 * v]);  // the product is exact either way
    sums[2 * v + 1] = fma(high, high, sums[2 * v + 1]);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (i % kChunk == 0) Type::prefetch(src, i + kAhead);
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVectors; ++v)
      add(v, Type::load(src, i + v * kWidth, All{}));
  }
  for (int64_t v = 0; i < n; ++v, i += kWidth) {  // missing lanes add zero
    const int64_t left = n - i < kWidth ? n - i : kWidth;
    add(v, Type::load(src, i, First{static_cast<size_t>(left)}));
  }
  double lane[kLanes];
  memcpy(lane, sums, sizeof lane);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l)
      lane[l] += lane[l + half];
  }
  return lane[0];
}

double sum_of_squares_any(const void* src, DType dtype, int64_t n) {
  double sum = 0;
  with_type(dtype, [&](auto type) { sum = sum_of_squares_typed<decltype(type)>(src, n); });
  return sum;
}

}  // namespace
}  // namespace tessera::kernels

// Element-wise passes over vectors. The arithmetic and its order are those of reference.cpp, so the
// bits are too.
#pragma once

#include "tessera/kernels/elementwise.h"
#include "tessera/kernels/table.h"
#include "tessera/kernels/vec.inc.h"

namespace tessera::kernels {
namespace {

// dst = factor * src, or dst += factor * src. `random` is for stochastic types of dst.
template <bool add, class Dst, class Src>
void scale_typed(void* dst, const void* src, float factor, int64_t n, const RandomKey& random = {}) {
  constexpr Order order = Dst::bytes == 2 ? Order::EvenOdd : Order::Natural;
  const F scale = splat(factor);
  Roots roots(random);
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    Src::prefetch(src, i);
    Dst::prefetch(dst, i);
  };
  const int64_t distance = elements_ahead(Src::bytes + Dst::bytes);
  for_each_pair(n, distance, prefetch, [=, &roots](int64_t i, auto lanes) __attribute__((always_inline)) {
    Pair x = Src::template load<order>(src, i, lanes);
    if constexpr (add) {
      const Pair y = Dst::template load<order>(dst, i, lanes);
      x = {fma(scale, x.a, y.a), fma(scale, x.b, y.b)};
    } else {
      x = {x.a * scale, x.b * scale};
    }
    put<order, Dst, kGradient>(dst, i, lanes, x, Random<Dst::stochastic>(roots));
  });
}

// Loads and stores alone keep every bit. Prefetching makes this faster than memcpy on large ranges.
void copy_bits(void* dst, const void* src, int64_t bytes) {
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    F32::prefetch(src, i);
    F32::prefetch(dst, i);
  };
  const int64_t distance = elements_ahead(2 * F32::bytes);
  for_each_pair(bytes / 4, distance, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    F32::store<Order::Natural>(dst, i, lanes, F32::load<Order::Natural>(src, i, lanes));
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
    with_type(src_dtype, [&](auto from) { scale_typed<false, decltype(to), decltype(from)>(dst, src, scale, n); });
  });
}

void scaled_add_any(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n) {
  with_type(dst_dtype, [&](auto to) {
    with_type(src_dtype, [&](auto from) { scale_typed<true, decltype(to), decltype(from)>(dst, src, scale, n); });
  });
}

// A sum for each element of a chunk: enough that no addition waits for the one before it.
template <class Type>
double sum_of_squares_typed(const void* src, int64_t n) {
  static_assert(kChunk == kSumLanes);
  constexpr Order order = Type::natural ? Order::Natural : Order::EvenOdd;
  D sums[kSumLanes / (kWidth / 2)] = {};
  const auto add = [&](int64_t v, F x) __attribute__((always_inline)) {
    const D low = low_doubles(x), high = high_doubles(x);
    sums[v] = fma(low, low, sums[v]);  // the product is exact either way
    sums[v + 1] = fma(high, high, sums[v + 1]);
  };
  const auto add_chunk = [&](int64_t i, auto lanes_at) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < kChunk; k += kStride) {
      const Pair x = Type::template load<order>(src, i + k, lanes_at(k));  // missing elements are zero
      add(k / (kWidth / 2), x.a);
      add(k / (kWidth / 2) + 2, x.b);
    }
  };
  int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk) {
    Type::prefetch(src, i + elements_ahead(Type::bytes));
    add_chunk(i, [](int64_t) { return All{}; });
  }
  add_chunk(i, [=](int64_t k) {
    const int64_t left = n - i - k;
    return First{static_cast<size_t>(left < 0 ? 0 : left < kStride ? left : kStride)};
  });
  double by_place[kSumLanes], lane[kSumLanes];
  memcpy(by_place, sums, sizeof sums);
  for (int64_t place = 0; place < kSumLanes; ++place)
    lane[element_at<order>(place)] = by_place[place];
  for (int64_t half = kSumLanes / 2; half > 0; half /= 2) {
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

RandomKey from_element(RandomKey random, int64_t begin) {
  random.first += static_cast<uint64_t>(begin);
  return random;
}

template <bool add>
void scale_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                      const RandomKey& random) {
  if (dst_dtype == DType::F32)
    return (add ? scaled_add_any : scaled_copy_any)(dst, dst_dtype, src, src_dtype, scale, n);
  // The elements of a random word that begins before the range are left to the reference.
  const int64_t begin = inside_word(random, n);
  if (begin != 0) {
    const Table& table = reference_table();
    const auto reference = add ? table.scaled_add_stochastic : table.scaled_copy_stochastic;
    reference(dst, dst_dtype, src, src_dtype, scale, begin, random);
  }
  const auto rest = [&](auto to, auto from) {
    using To = decltype(to);
    using From = decltype(from);
    scale_typed<add, To, From>(To::at(dst, begin), From::at(src, begin), scale, n - begin, from_element(random, begin));
  };
  with_type(src_dtype, [&](auto from) {
    if (dst_dtype == DType::BF16) return rest(Bf16Stochastic{}, from);
    rest(F16Stochastic{}, from);
  });
}

}  // namespace
}  // namespace tessera::kernels

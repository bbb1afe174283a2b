// Element-wise passes over vectors. The arithmetic and its order are those of reference.cpp, so the
// bits are too.
#pragma once

#include "tessera/kernels/elementwise.h"
#include "tessera/kernels/table.h"
#include "tessera/kernels/vec.inc.h"

namespace tessera::kernels {
namespace {

// `random` is for stochastic types of dst.
template <class Dst, class Src>
void copy_typed(void* dst, const void* src, float factor, int64_t n, const RandomKey& random = {}) {
  constexpr Order order = Dst::bytes == 2 ? Order::EvenOdd : Order::Natural;
  const F scale = splat(factor);
  Roots roots(random);
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    Src::prefetch(src, i);
    Dst::prefetch(dst, i);
  };
  const int64_t distance = elements_ahead(Src::bytes + Dst::bytes);
  for_each_pair(n, distance, prefetch, [=, &roots](int64_t i, auto lanes) __attribute__((always_inline)) {
    const Pair x = Src::template load<order>(src, i, lanes);
    put<order, Dst, kGradient>(dst, i, lanes, {x.a * scale, x.b * scale}, Random<Dst::stochastic>(roots));
  });
}

template <class Dst, class Src>
void add_typed(void* dst, const void* src, float factor, int64_t n, const RandomKey& random = {}) {
  constexpr Order order = Dst::bytes == 2 ? Order::EvenOdd : Order::Natural;
  const F scale = splat(factor);
  Roots roots(random);
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    Src::prefetch(src, i);
    Dst::prefetch(dst, i);
  };
  const int64_t distance = elements_ahead(Src::bytes + Dst::bytes);
  for_each_pair(n, distance, prefetch, [=, &roots](int64_t i, auto lanes) __attribute__((always_inline)) {
    const Pair x = Src::template load<order>(src, i, lanes), y = Dst::template load<order>(dst, i, lanes);
    const Pair sum{fma(scale, x.a, y.a), fma(scale, x.b, y.b)};
    put<order, Dst, kGradient>(dst, i, lanes, sum, Random<Dst::stochastic>(roots));
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
    with_type(src_dtype, [&](auto from) { copy_typed<decltype(to), decltype(from)>(dst, src, scale, n); });
  });
}

void scaled_add_any(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n) {
  with_type(dst_dtype, [&](auto to) {
    with_type(src_dtype, [&](auto from) { add_typed<decltype(to), decltype(from)>(dst, src, scale, n); });
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

// lead(n) for the elements of a random word that begins before the range, which are left to the reference; call(to, from,
// begin) for the others, from `begin` on, with the stochastic type of dst.
template <class Lead, class Call>
TESSERA_INLINE void with_stochastic(DType dst, DType src, int64_t n, const RandomKey& random, const Lead& lead,
                                    const Call& call) {
  const int64_t begin = inside_word(random, n);
  if (begin != 0) lead(begin);
  with_type(src, [&](auto from) {
    if (dst == DType::BF16) return call(Bf16Stochastic{}, from, begin);
    call(F16Stochastic{}, from, begin);
  });
}

RandomKey from_element(RandomKey random, int64_t begin) {
  random.first += static_cast<uint64_t>(begin);
  return random;
}

void scaled_copy_stochastic_any(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                                const RandomKey& random) {
  if (dst_dtype == DType::F32) return scaled_copy_any(dst, dst_dtype, src, src_dtype, scale, n);
  const auto lead = [&](int64_t count) {
    reference_table().scaled_copy_stochastic(dst, dst_dtype, src, src_dtype, scale, count, random);
  };
  with_stochastic(dst_dtype, src_dtype, n, random, lead, [&](auto to, auto from, int64_t begin) {
    using To = decltype(to);
    using From = decltype(from);
    copy_typed<To, From>(To::at(dst, begin), From::at(src, begin), scale, n - begin, from_element(random, begin));
  });
}

void scaled_add_stochastic_any(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                               const RandomKey& random) {
  if (dst_dtype == DType::F32) return scaled_add_any(dst, dst_dtype, src, src_dtype, scale, n);
  const auto lead = [&](int64_t count) {
    reference_table().scaled_add_stochastic(dst, dst_dtype, src, src_dtype, scale, count, random);
  };
  with_stochastic(dst_dtype, src_dtype, n, random, lead, [&](auto to, auto from, int64_t begin) {
    using To = decltype(to);
    using From = decltype(from);
    add_typed<To, From>(To::at(dst, begin), From::at(src, begin), scale, n - begin, from_element(random, begin));
  });
}

}  // namespace
}  // namespace tessera::kernels

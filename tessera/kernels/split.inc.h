// Split master weights over vectors (Note [Split master] in convert.h).
#pragma once

#include "tessera/kernels/split.h"
#include "tessera/kernels/vec.inc.h"

namespace tessera::kernels {
namespace {

struct SplitHalves {
  // Adds the low half with its sign to the upper one.
  template <Order order, class Lanes>
  static TESSERA_INLINE Pair load(const void* weight, const void* residual, int64_t i, Lanes lanes) {
    const Pair upper = Bf16::load<order>(weight, i, lanes);
    const Bits low = Halves::load_upper<order>(residual, i, lanes);
    return {joined((U)upper.a, (I)low.a >> 16), joined((U)upper.b, (I)low.b >> 16)};
  }
  template <Order order, class Lanes>
  static TESSERA_INLINE void store(void* weight, void* residual, int64_t i, Lanes lanes, const Pair& x) {
    Halves::store_upper<order>(weight, i, lanes, upper_of(x.a), upper_of(x.b));
    Halves::store_upper<order>(residual, i, lanes, low_of(x.a), low_of(x.b));
  }

 private:
  static TESSERA_INLINE F joined(U upper, I low) {
    const I none{};
    const I below_zero = ((I)(upper << 1) == none) & (low < none);
    return (F)(upper + (U)(low & ~below_zero));
  }
  static TESSERA_INLINE U upper_of(F x) {
    const U bits = (U)x;
    return x == x ? bits + 0x8000u : bits | 0x400000u;
  }
  static TESSERA_INLINE U low_of(F x) {
    const U zero{};
    return x == x ? (U)x << 16 : zero;
  }
};

constexpr int64_t kSplitAhead = elements_ahead(F32::bytes + 2 * Halves::bytes);

void split_any(void* weight, void* residual, const float* src, int64_t n) {
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    F32::prefetch(src, i);
    Halves::prefetch(weight, i);
    Halves::prefetch(residual, i);
  };
  for_each_pair(n, kSplitAhead, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    SplitHalves::store<Order::EvenOdd>(weight, residual, i, lanes, F32::load<Order::EvenOdd>(src, i, lanes));
  });
}

void join_any(float* dst, const void* weight, const void* residual, int64_t n) {
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    Halves::prefetch(weight, i);
    Halves::prefetch(residual, i);
    F32::prefetch(dst, i);
  };
  for_each_pair(n, kSplitAhead, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    F32::store<Order::EvenOdd>(dst, i, lanes, SplitHalves::load<Order::EvenOdd>(weight, residual, i, lanes));
  });
}

}  // namespace
}  // namespace tessera::kernels

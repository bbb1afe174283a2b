#include "tessera/comm/reduce_rows.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#if defined(__x86_64__)
#include <immintrin.h>

#include "tessera/base/cpu.h"
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/comm/copy_bytes.h"

namespace tessera::comm {
namespace {

// Functions are compiled once more for wider registers where the compiler can.
#if defined(__x86_64__)
#define TESSERA_WIDE __attribute__((target("avx2"), flatten))
bool has_wide() {
  return __builtin_cpu_supports("avx2") != 0 && has_f16c();
}
#else
#define TESSERA_WIDE
bool has_wide() {
  return false;
}
#endif

constexpr int64_t kBlock = 1024;     // elements; the fp32 sums of a block stay in the first-level cache
constexpr int64_t kGrain = 1 << 18;  // elements per thread worth a thread

// The type of the arithmetic, by element type. Integers add as unsigned: overflow wraps and is defined.
template <class T>
struct Arithmetic {
  using type = T;
};
template <>
struct Arithmetic<c10::BFloat16> {
  using type = float;
};
template <>
struct Arithmetic<c10::Half> {
  using type = float;
};

template <class T>
inline typename Arithmetic<T>::type widen(T x) {
  return x;
}
inline float widen(c10::BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.x) << 16);
}

template <class T>
inline T narrow(typename Arithmetic<T>::type x) {
  return static_cast<T>(x);
}
// Rounds to nearest, ties to even, without a branch so that the loop vectorises.
template <>
inline c10::BFloat16 narrow<c10::BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return c10::BFloat16(static_cast<uint16_t>(nan ? 0x7fc0u : rounded), c10::BFloat16::from_bits());
}

// Converts fp16 to fp32 and back, for n up to kBlock. The blocks of fp32, and the result, have room for whole eights.
static_assert(kBlock % 8 == 0);
#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) void widen_eights(float* to, const c10::Half* from, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  if (i == n) return;
  __m128i rest{};
  std::memcpy(&rest, from + i, static_cast<size_t>(n - i) * sizeof(c10::Half));
  _mm256_storeu_ps(to + i, _mm256_cvtph_ps(rest));
}
__attribute__((target("avx2,f16c"))) void narrow_eights(c10::Half* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
}
#else
void widen_eights(float*, const c10::Half*, int64_t) {}
void narrow_eights(c10::Half*, const float*, int64_t) {}
#endif

template <bool wide>
inline void widen_halves(float* to, const c10::Half* from, int64_t n) {
  if constexpr (wide) {
    widen_eights(to, from, n);
  } else {
    std::copy(from, from + n, to);
  }
}
template <bool wide>
inline void narrow_halves(c10::Half* to, const float* from, int64_t n) {
  if constexpr (wide) {
    narrow_eights(to, from, n);
  } else {
    std::copy(from, from + n, to);
  }
}

template <class A>
inline A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <class A>
inline A multiply(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <ReduceOp op, class A>
inline A combine(A a, A b) {
  if constexpr (op == ReduceOp::Min) {
    return (b < a || b != b) ? b : a;  // NaN wins; a NaN in `a` stays because comparisons with it are false
  } else if constexpr (op == ReduceOp::Max) {
    return (b > a || b != b) ? b : a;
  } else if constexpr (op == ReduceOp::Product) {
    return multiply(a, b);
  } else if constexpr (op == ReduceOp::BitAnd) {
    return static_cast<A>(std::bit_and<>()(a, b));
  } else if constexpr (op == ReduceOp::BitOr) {
    return static_cast<A>(std::bit_or<>()(a, b));
  } else if constexpr (op == ReduceOp::BitXor) {
    return static_cast<A>(std::bit_xor<>()(a, b));
  } else {
    return add(a, b);
  }
}

template <ReduceOp op, class A>
inline A averaged(A sum, int count) {
  if constexpr (op == ReduceOp::Avg) sum = sum / static_cast<A>(count);
  return sum;
}

// Whether more code is worth it: what gradients take.
template <class A, ReduceOp op>
constexpr bool kOften = std::is_floating_point_v<A> && (op == ReduceOp::Sum || op == ReduceOp::Avg);

// Elements [begin, begin + n) of `many` rows.
template <class T, int many>
struct Rows {
  const T* at[many];
  Rows(const void* const* rows, int64_t begin) {
    for (int r = 0; r < many; ++r)
      at[r] = static_cast<const T*>(rows[r]) + begin;
  }
};

// `sum` and element i of the rows from `first` on, in the rows' order.
template <ReduceOp op, int first, class A, class T, int many>
inline A with_rows(A sum, const Rows<T, many>& rows, int64_t i) {
  for (int r = first; r < many; ++r)
    sum = combine<op, A>(sum, widen(rows.at[r][i]));
  return sum;
}

template <class T, ReduceOp op, int many, class A>
inline void add_rows(A* sums, const Rows<T, many>& rows, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    sums[i] = with_rows<op, 0>(sums[i], rows, i);
}

// Reduces all rows in one pass.
template <class T, ReduceOp op, int many>
inline void reduce_together(T* result, const Rows<T, many>& rows, int64_t n) {
  using A = typename Arithmetic<T>::type;
  for (int64_t i = 0; i < n; ++i)
    result[i] = narrow<T>(averaged<op>(with_rows<op, 1, A>(widen(rows.at[0][i]), rows, i), many));
}

template <class T, ReduceOp op>
inline void reduce_in_turn(T* result, const void* const* rows, int count, int64_t begin, int64_t n) {
  using A = typename Arithmetic<T>::type;
  alignas(64) A sums[kBlock];
  const T* const row = static_cast<const T*>(rows[0]) + begin;
  for (int64_t i = 0; i < n; ++i)
    sums[i] = widen(row[i]);
  int done = 1;
  if constexpr (kOften<A, op>) {
    for (; done + 4 <= count; done += 4)
      add_rows<T, op, 4>(sums, {rows + done, begin}, n);
  }
  for (; done < count; ++done)
    add_rows<T, op, 1>(sums, {rows + done, begin}, n);
  for (int64_t i = 0; i < n; ++i)
    result[i] = narrow<T>(averaged<op>(sums[i], count));
}

// Reduces fp16, which compilers convert one by one.
template <ReduceOp op, bool wide>
inline void reduce_halves(c10::Half* result, const void* const* rows, int count, int64_t begin, int64_t n) {
  alignas(64) float sums[kBlock], row[kBlock];
  const void* const next = row;
  for (int r = 0; r < count; ++r) {
    widen_halves<wide>(r == 0 ? sums : row, static_cast<const c10::Half*>(rows[r]) + begin, n);
    if (r > 0) add_rows<float, op, 1>(sums, {&next, 0}, n);
  }
  for (int64_t i = 0; i < n; ++i)
    sums[i] = averaged<op>(sums[i], count);
  narrow_halves<wide>(result, sums, n);
}

// The result goes through a block of its own, because `out` may be one of the rows, which would keep the loops from
// being vectorised. Two rows, often up to four, take one pass.
template <class T, ReduceOp op, bool wide>
inline void reduce_block(T* out, const void* const* rows, int count, int64_t begin, int64_t n, int64_t total) {
  alignas(64) T result[kBlock];
  if constexpr (std::is_same_v<T, c10::Half>) {
    reduce_halves<op, wide>(result, rows, count, begin, n);
  } else if (count == 2) {
    reduce_together<T, op, 2>(result, {rows, begin}, n);
  } else if (kOften<typename Arithmetic<T>::type, op> && count == 3) {
    reduce_together<T, op, 3>(result, {rows, begin}, n);
  } else if (kOften<typename Arithmetic<T>::type, op> && count == 4) {
    reduce_together<T, op, 4>(result, {rows, begin}, n);
  } else {
    reduce_in_turn<T, op>(result, rows, count, begin, n);
  }
  copy_result(reinterpret_cast<char*>(out + begin), reinterpret_cast<const char*>(result),
              n * static_cast<int64_t>(sizeof(T)), total);
}

using RangeFn = void (*)(void* out, const void* const* rows, int count, int64_t begin, int64_t end, int64_t total);

template <class T, ReduceOp op, bool wide>
inline void reduce_blocks(void* out, const void* const* rows, int count, int64_t begin, int64_t end, int64_t total) {
  for (int64_t at = begin; at < end; at += kBlock) {
    reduce_block<T, op, wide>(static_cast<T*>(out), rows, count, at, std::min(kBlock, end - at), total);
  }
}

template <class T, ReduceOp op>
void reduce_range(void* out, const void* const* rows, int count, int64_t begin, int64_t end, int64_t total) {
  reduce_blocks<T, op, false>(out, rows, count, begin, end, total);
}

// reduce_range() with wider registers. The bits are the same, but a NaN's payload: nothing may be contracted or reordered.
template <class T, ReduceOp op>
TESSERA_WIDE void reduce_range_wide(void* out, const void* const* rows, int count, int64_t begin, int64_t end,
                                    int64_t total) {
  reduce_blocks<T, op, true>(out, rows, count, begin, end, total);
}

template <class T, ReduceOp op>
RangeFn pick_width() {
  static const bool wide = has_wide();
  return wide ? &reduce_range_wide<T, op> : &reduce_range<T, op>;
}

template <class T>
RangeFn pick_bits(ReduceOp op) {
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::BitAnd) return pick_width<T, ReduceOp::BitAnd>();
    if (op == ReduceOp::BitOr) return pick_width<T, ReduceOp::BitOr>();
    if (op == ReduceOp::BitXor) return pick_width<T, ReduceOp::BitXor>();
  }
  return nullptr;
}

template <class T>
RangeFn pick_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return pick_width<T, ReduceOp::Sum>();
    case ReduceOp::Min:
      return pick_width<T, ReduceOp::Min>();
    case ReduceOp::Max:
      return pick_width<T, ReduceOp::Max>();
    case ReduceOp::Product:
      return pick_width<T, ReduceOp::Product>();
    case ReduceOp::Avg:
      if constexpr (!std::is_integral_v<T>) return pick_width<T, ReduceOp::Avg>();
      return nullptr;
    default:
      return pick_bits<T>(op);
  }
}

RangeFn pick(c10::ScalarType dtype, ReduceOp op) {
  using S = c10::ScalarType;
  switch (dtype) {
    case S::Float:
      return pick_op<float>(op);
    case S::Double:
      return pick_op<double>(op);
    case S::BFloat16:
      return pick_op<c10::BFloat16>(op);
    case S::Half:
      return pick_op<c10::Half>(op);
    case S::Byte:
      return pick_op<uint8_t>(op);
    case S::Char:
      return pick_op<int8_t>(op);
    case S::Short:
      return pick_op<int16_t>(op);
    case S::Int:
      return pick_op<int32_t>(op);
    case S::Long:
      return pick_op<int64_t>(op);
    case S::Bool:
      return op == ReduceOp::Sum || op == ReduceOp::Product ? nullptr : pick_op<uint8_t>(op);
    default:
      return nullptr;
  }
}

}  // namespace

bool can_reduce(c10::ScalarType dtype, ReduceOp op) {
  return pick(dtype, op) != nullptr;
}

void reduce_rows(void* out, const void* const* rows, int count, int64_t n, c10::ScalarType dtype, ReduceOp op,
                 int64_t total) {
  const RangeFn range = pick(dtype, op);
  TESSERA_ASSERT(range != nullptr && count >= 1);
  if (n == 0) return;
  parallel_ranges(n, kGrain, kBlock, [&](int64_t begin, int64_t end) { range(out, rows, count, begin, end, total); });
}

}  // namespace tessera::comm

#include "tessera/comm/reduce_rows.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/comm/copy_bytes.h"

namespace tessera::comm {
namespace {

// Compiled once more for wider registers where the compiler can.
#if defined(__x86_64__)
#define TESSERA_WIDE __attribute__((target("avx2"), flatten))
bool has_wide() {
  return __builtin_cpu_supports("avx2") != 0;
}
#else
#define TESSERA_WIDE
bool has_wide() {
  return false;
}
#endif

constexpr int64_t kBlock = 1024;     // elements; the fp32 sums of a block stay in the first-level cache
constexpr int64_t kGrain = 1 << 18;  // elements per thread worth a thread

// Element type -> type of the arithmetic. Integers add as unsigned: overflow wraps and is defined.
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
// Nearest, ties to even, without a branch so that the loop vectorises.
template <>
inline c10::BFloat16 narrow<c10::BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return c10::BFloat16(static_cast<uint16_t>(nan ? 0x7fc0u : rounded), c10::BFloat16::from_bits());
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

template <class T, ReduceOp op, class A>
inline T finish(A sum, int count) {
  if constexpr (op == ReduceOp::Avg) sum = sum / static_cast<A>(count);
  return narrow<T>(sum);
}

// Two rows, the common case of two ranks, take one pass. The result goes through a block of its own, because `out` may
// be one of the rows, which would keep the loops from being vectorised.
template <class T, ReduceOp op>
inline void reduce_block(T* out, const void* const* rows, int count, int64_t begin, int64_t n, int64_t total) {
  using A = typename Arithmetic<T>::type;
  alignas(64) T result[kBlock];
  const T* first = static_cast<const T*>(rows[0]) + begin;
  if (count == 2) {
    const T* second = static_cast<const T*>(rows[1]) + begin;
    for (int64_t i = 0; i < n; ++i)
      result[i] = finish<T, op, A>(combine<op, A>(widen(first[i]), widen(second[i])), count);
  } else {
    alignas(64) A acc[kBlock];
    for (int64_t i = 0; i < n; ++i)
      acc[i] = widen(first[i]);
    for (int r = 1; r < count; ++r) {
      const T* row = static_cast<const T*>(rows[r]) + begin;
      for (int64_t i = 0; i < n; ++i)
        acc[i] = combine<op, A>(acc[i], widen(row[i]));
    }
    for (int64_t i = 0; i < n; ++i)
      result[i] = finish<T, op, A>(acc[i], count);
  }
  copy_result(reinterpret_cast<char*>(out + begin), reinterpret_cast<const char*>(result),
              n * static_cast<int64_t>(sizeof(T)), total);
}

using RangeFn = void (*)(void* out, const void* const* rows, int count, int64_t begin, int64_t end, int64_t total);

template <class T, ReduceOp op>
inline void reduce_blocks(void* out, const void* const* rows, int count, int64_t begin, int64_t end, int64_t total) {
  for (int64_t at = begin; at < end; at += kBlock) {
    reduce_block<T, op>(static_cast<T*>(out), rows, count, at, std::min(kBlock, end - at), total);
  }
}

template <class T, ReduceOp op>
void reduce_range(void* out, const void* const* rows, int count, int64_t begin, int64_t end, int64_t total) {
  reduce_blocks<T, op>(out, rows, count, begin, end, total);
}

// The same loops with wider registers: same bits, as nothing in them may be contracted or reordered.
template <class T, ReduceOp op>
TESSERA_WIDE void reduce_range_wide(void* out, const void* const* rows, int count, int64_t begin, int64_t end,
                                    int64_t total) {
  reduce_blocks<T, op>(out, rows, count, begin, end, total);
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

// Element types and the loop of the vector kernels, over the vectors of an isa_*.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "tessera/kernels/random.h"
#include "tessera/kernels/types.h"

#define TESSERA_INLINE inline __attribute__((always_inline))

namespace tessera::kernels {
namespace {

constexpr int64_t kChunk = 32;           // elements per prefetch: whole cache lines of every type
constexpr int64_t kInFlight = 8192;      // bytes of all streams together between use and prefetch
constexpr int64_t kLine = 64;            // bytes
constexpr int64_t kStride = 2 * kWidth;  // elements of a step of the loop: a Pair

// A step's elements. Natural: the first kWidth and the others. EvenOdd: those at even places and those at odd places;
// then 16-bit elements are taken apart by a shift and a mask, where Natural order takes shuffles, but fp32 elements and
// fp16 ones, which an instruction converts that knows no other order, have to be shuffled.
struct Pair {
  F a, b;
};
struct Bits {  // the bits of a Pair
  U a, b;
};
enum class Order { Natural, EvenOdd };
// Which element is at a place of a Pair, or of several one after the other.
template <Order order>
constexpr int64_t element_at(int64_t place) {
  if (order == Order::Natural) return place;
  const int64_t within = place % kStride;
  return place - within + 2 * (within % kWidth) + within / kWidth;
}

// How many elements of a step are there. All is known to the compiler, so its loads and stores are single instructions.
struct All {
  static constexpr size_t count() { return kStride; }
};
struct First {
  size_t elements;
  size_t count() const { return elements; }
};

// in_uppers(): 16-bit elements as they lie in memory, in upper halves of lanes; what EvenOdd order leaves in the low ones has no
// meaning. uppers(), lows(): what lanes of `a` and `b` have in their upper or low halves, as it lies in memory.
template <Order order>
TESSERA_INLINE Bits in_uppers(U halves) {
  if constexpr (order == Order::Natural) return {first_uppers(halves), second_uppers(halves)};
  return {halves << 16, halves};
}
template <Order order>
TESSERA_INLINE U uppers(U a, U b) {
  return order == Order::Natural ? list_uppers(a, b) : join_uppers(a, b);
}
template <Order order>
TESSERA_INLINE U lows(U a, U b) {
  return order == Order::Natural ? list_lows(a, b) : join_lows(a, b);
}

template <int Bytes>
struct Element {
  static constexpr int bytes = Bytes;

  static TESSERA_INLINE void* at(void* p, int64_t i) { return static_cast<char*>(p) + i * bytes; }
  static TESSERA_INLINE const void* at(const void* p, int64_t i) { return static_cast<const char*>(p) + i * bytes; }

  template <class Raw, class Lanes>
  static TESSERA_INLINE Raw read(const void* p, int64_t i, Lanes lanes) {
    Raw raw{};
    memcpy(&raw, at(p, i), lanes.count() * bytes);
    return raw;
  }
  template <class Raw, class Lanes>
  static TESSERA_INLINE void write(void* p, int64_t i, Lanes lanes, const Raw& raw) {
    memcpy(at(p, i), &raw, lanes.count() * bytes);
  }
  // Reads two vectors, a and b, that lie one after the other. Where both are whole each is copied by itself: compilers may copy a
  // structure of two vectors in pieces.
  template <class Two>
  static TESSERA_INLINE Two read_two(const void* p, int64_t i, All) {
    Two two;
    memcpy(&two.a, at(p, i), sizeof two.a);
    memcpy(&two.b, at(p, i + kWidth), sizeof two.b);
    return two;
  }
  template <class Two>
  static TESSERA_INLINE Two read_two(const void* p, int64_t i, First lanes) {
    return read<Two>(p, i, lanes);
  }
  template <class Two>
  static TESSERA_INLINE void write_two(void* p, int64_t i, All, const Two& two) {
    memcpy(at(p, i), &two.a, sizeof two.a);
    memcpy(at(p, i + kWidth), &two.b, sizeof two.b);
  }
  template <class Two>
  static TESSERA_INLINE void write_two(void* p, int64_t i, First lanes, const Two& two) {
    write(p, i, lanes, two);
  }
  // Asks for the lines that hold elements [i, i + kChunk). May lie behind the end: a prefetch never
  // faults.
  static TESSERA_INLINE void prefetch(const void* p, int64_t i) {
    const auto address = reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(i * bytes);
    for (int64_t line = 0; line < kChunk * bytes; line += kLine) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): as a pointer it may not leave its array
      __builtin_prefetch(reinterpret_cast<const void*>(address + static_cast<uintptr_t>(line)));
    }
  }
};

struct F32 : Element<4> {
  static constexpr bool stochastic = false, natural = true;
  template <Order order, class Lanes>
  static TESSERA_INLINE Pair load(const void* p, int64_t i, Lanes lanes) {
    const auto raw = read_two<Pair>(p, i, lanes);
    return order == Order::Natural ? raw : Pair{even_of(raw.a, raw.b), odd_of(raw.a, raw.b)};
  }
  template <Order order, class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, const Pair& x) {
    write_two(p, i, lanes, order == Order::Natural ? x : Pair{low_mix(x.a, x.b), high_mix(x.a, x.b)});
  }
};

// 16-bit elements in the upper halves of lanes.
struct Halves : Element<2> {
  template <Order order, class Lanes>
  static TESSERA_INLINE Bits load_upper(const void* p, int64_t i, Lanes lanes) {
    return in_uppers<order>(read<U>(p, i, lanes));
  }
  template <Order order, class Lanes>
  static TESSERA_INLINE void store_upper(void* p, int64_t i, Lanes lanes, U a, U b) {
    write(p, i, lanes, uppers<order>(a, b));
  }
};

// The 16-bit conversions give the bits of their namesakes in convert.h; a NaN's payload may differ. What is stored comes
// out of arithmetic, so that a NaN is quiet: its upper half is one without rounding.
struct Bf16 : Halves {
  static constexpr bool stochastic = false, natural = false;
  template <Order order, class Lanes>
  static TESSERA_INLINE Pair load(const void* p, int64_t i, Lanes lanes) {
    const Bits bits = load_upper<order>(p, i, lanes);
    if constexpr (order == Order::Natural) return {(F)bits.a, (F)bits.b};
    return {(F)bits.a, (F)(bits.b & 0xffff0000u)};
  }
  static TESSERA_INLINE F rounded(F x) {  // but a NaN
    const U bits = (U)x;
    return (F)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  }
  template <Order order, class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, const Pair& x) {
    const U upper = uppers<order>((U)x.a, (U)x.b);
    const U bound = 0x80008000u - (upper & 0x00010001u);
    write(p, i, lanes, carry<order>(upper, x, bound, 0x7f80u));  // not to a NaN
  }

 protected:
  // Rounds all at once: up where the low halves hold more than `bound`, and `upper` is below `limit`, without the
  // sign.
  template <Order order>
  static TESSERA_INLINE U carry(U upper, const Pair& x, U bound, uint32_t limit) {
    return carry_halves(upper, lows<order>((U)x.a, (U)x.b), bound, constant(limit * 0x10001u));
  }
};

struct Bf16Stochastic : Bf16 {
  static constexpr bool stochastic = true;
  // Values above the largest finite one, and NaN, are cut off.
  template <Order order, class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, const Pair& x, U bound) {
    write(p, i, lanes, carry<order>(uppers<order>((U)x.a, (U)x.b), x, bound, 0x7f7fu));
  }
};

struct F16 : Halves {
  struct Two {
    H a, b;
  };
  static constexpr bool stochastic = false, natural = true;  // converted by an instruction that knows no other order
  template <Order order, class Lanes>
  static TESSERA_INLINE Pair load(const void* p, int64_t i, Lanes lanes) {
    const auto raw = read_two<Two>(p, i, lanes);
    const F a = widen_f16(raw.a), b = widen_f16(raw.b);
    return order == Order::Natural ? Pair{a, b} : Pair{even_of(a, b), odd_of(a, b)};
  }
  static TESSERA_INLINE F rounded(F x) { return widen_f16(narrow_f16(x)); }
  template <Order order, class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, const Pair& x) {
    const Pair y = order == Order::Natural ? x : Pair{low_mix(x.a, x.b), high_mix(x.a, x.b)};
    write_two(p, i, lanes, Two{narrow_f16(y.a), narrow_f16(y.b)});
  }
};

struct F16Stochastic : F16 {
  static constexpr bool stochastic = true;
  // Normal numbers in Natural order: the random bits are added to the bits that the processor then cuts off.
  template <Order order, class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, const Pair& x, U bound) {
    const U upper = join_uppers((U)x.a, (U)x.b);
    if (!normal(upper)) [[unlikely]] {
      write(p, i, lanes, any<order>(x, bound));
    } else if constexpr (order == Order::Natural) {
      const Bits random = in_uppers<order>(~bound);
      const U a = (U)x.a + (random.a >> 19), b = (U)x.b + (random.b >> 19);
      write_two(p, i, lanes, Two{cut_f16((F)a), cut_f16((F)b)});
    } else {
      write(p, i, lanes, joined<order>(upper, (U)x.a << 3, (U)x.b << 3, bound));
    }
  }

 private:
  template <Order order>
  static TESSERA_INLINE U any(const Pair& x, U bound) {
    const U upper = uppers<order>((U)x.a, (U)x.b);
    if (each_half_within(upper, 0, 0x477e)) return joined<order>(upper, moved(x.a), moved(x.b), bound);
    const Bits random = in_uppers<order>(~bound);
    return uppers<order>(rounded(x.a, random.a >> 16) << 16, rounded(x.b, random.b >> 16) << 16);
  }
  // Whether all are normal numbers, and none is so large that rounding could end above the largest.
  static TESSERA_INLINE bool normal(U uppers) { return each_half_within(uppers, 0x3880, 0x477e); }
  // A normal number of fp16 has its bits in those of fp32: the sign and the first bit of the exponent in front, the others
  // three places further down. Moved up (a and b) they are in the upper half, and rounded as bf16 is.
  template <Order order>
  static TESSERA_INLINE U joined(U upper, U a, U b, U bound) {
    const U cut = select_bits(constant(0xc000c000u), upper, uppers<order>(a, b));
    return carry_halves(cut, lows<order>(a, b), bound);
  }
  // The bits for joined(), also of denormals: those of the sum in convert.h.
  static TESSERA_INLINE U moved(F x) {
    const U magnitude = (U)x & 0x7fffffffu;
    const U sum = (U)((F)magnitude + splat(0x1p-14f));
    return magnitude < 0x38800000u ? (sum << 3) - 0x04000000u : (U)x << 3;
  }
  static TESSERA_INLINE U rounded(F x, U random) {
    const U bits = (U)x, magnitude = bits & 0x7fffffffu;
    const U normal = (magnitude - 0x38000000u + (random >> 3)) >> 13;
    const U denormal = ((U)((F)magnitude + splat(0x1p-14f)) - 0x38800000u + (random >> 3)) >> 13;
    const U finite = magnitude < 0x38800000u ? denormal : normal;
    const U largest = U{} + 0x7bffu, infinity = U{} + 0x7c00u, nan = U{} + 0x7e00u;
    const U above = magnitude > 0x7f800000u ? nan : (magnitude >= 0x477ff000u ? infinity : largest);
    return ((bits >> 16) & 0x8000u) | (magnitude > 0x477fe000u ? above : finite);
  }
};

// A stream that is not there.
struct None {
  static constexpr int bytes = 0;
  template <Order order, class Lanes>
  static TESSERA_INLINE void store(void*, int64_t, Lanes, const Pair&) {}
  static TESSERA_INLINE void prefetch(const void*, int64_t) {}
};

// The roots of a range's words, one Pair of elements after the other, from its first element on: the first of a word.
class Roots {
 public:
  explicit Roots(const RandomKey& random) {
    const StepKey key = step_key(random);
    count_ = (W)count_from(key.offset + (random.first >> 2) * kWeyl, kWeyl);
    mask_ = (U)(W{} + key.mask);
  }
  TESSERA_INLINE void next(U& x, U& product_of_it) {
    x = (U)count_;
    count_ += kStride / 4 * kWeyl;
    const U turned = rotated<32>(x);
    x = product(x, turned) ^ turned ^ mask_;
    product_of_it = product(x, rotated<32>(x));
  }

 private:
  W count_;
  U mask_;
};

// Random words of a Pair (Note [Random bits] in random.h): in EvenOdd order, the bits of both elements of a lane. What the
// streams share is computed once. Random<false>: nothing is drawn. They are used as bounds, the complements of the random
// bits: 16 dropped bits and the random ones carry where the dropped ones are above the bound.
template <bool drawn>
struct Random {
  TESSERA_INLINE explicit Random(Roots&) {}
};
template <>
struct Random<true> {
  U x, product_of_it;
  TESSERA_INLINE explicit Random(Roots& roots) { roots.next(x, product_of_it); }
  template <Stream stream>
  TESSERA_INLINE U bounds() const {
    if constexpr (is_first(stream)) return product_of_it ^ rotated<turn_of(stream)>(x);
    const U word = product_of_it ^ rotated<turn_of(kState0)>(x);
    return signed_product(word, constant(static_cast<uint32_t>(factor_of(stream)))) ^ rotated<turn_of(stream)>(word);
  }
};

// How many elements of a range are of a word that begins before the range: they are left to the reference.
TESSERA_INLINE int64_t inside_word(const RandomKey& random, int64_t n) {
  const auto left = static_cast<int64_t>(-random.first & 3);
  return left < n ? left : n;
}

// Stores, rounded as the type is.
template <Order order, class Type, Stream stream, class Lanes, class Random>
TESSERA_INLINE void put(void* p, int64_t i, Lanes lanes, const Pair& x, const Random& random) {
  if constexpr (Type::stochastic) {
    Type::template store<order>(p, i, lanes, x, random.template bounds<stream>());
  } else {
    Type::template store<order>(p, i, lanes, x);
  }
}

template <class Call>
TESSERA_INLINE void with_type(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::F32:
      return call(F32{});
    case DType::BF16:
      return call(Bf16{});
    case DType::F16:
      return call(F16{});
  }
}

// How many elements ahead of their use those of streams are prefetched that have `bytes` an element, all together. What
// must be on its way is latency times bandwidth (Little's law), whether it belongs to one stream or to four.
constexpr int64_t elements_ahead(int64_t bytes) {
  return kInFlight / bytes;
}

// Calls step(i, lanes) for every Pair of [0, n); prefetch(i + ahead) once per chunk.
template <class Prefetch, class Step>
TESSERA_INLINE void for_each_pair(int64_t n, int64_t ahead, const Prefetch& prefetch, const Step& step) {
  int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk) {
    prefetch(i + ahead);
#pragma GCC unroll 2
    for (int64_t k = 0; k < kChunk; k += kStride)
      step(i + k, All{});
  }
  if constexpr (kStride < kChunk) {
    for (; i + kStride <= n; i += kStride)
      step(i, All{});
  }
  if (i < n) step(i, First{static_cast<size_t>(n - i)});
}

// Does so in two halves, begin(late, i, lanes) and end(late, i, lanes): a step ends after the next one has begun.
template <class Late, class Prefetch, class Begin, class End>
TESSERA_INLINE void for_each_pair(int64_t n, int64_t ahead, const Prefetch& prefetch, const Begin& begin,
                                  const End& end) {
  int64_t i = 0;
  Late late{}, next{};
  if (n >= kStride) {
    begin(late, 0, All{});
    for (i = kStride; i + kStride <= n; i += kStride) {
      if (kStride == kChunk || i % kChunk == 0) prefetch(i + ahead);
      begin(next, i, All{});
      end(late, i - kStride, All{});
      late = next;
    }
    end(late, i - kStride, All{});
  }
  if (i < n) {
    const First rest{static_cast<size_t>(n - i)};
    begin(next, i, rest);
    end(next, i, rest);
  }
}

}  // namespace
}  // namespace tessera::kernels

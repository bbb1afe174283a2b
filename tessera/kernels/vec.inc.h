// Element types and the loop of the vector kernels, over the vectors of an isa_*.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "tessera/kernels/random.h"
#include "tessera/kernels/types.h"

#define TESSERA_INLINE inline __attribute__((always_inline))

namespace tessera::kernels {
namespace {

constexpr int64_t kChunk = 32;   // elements per prefetch: whole cache lines of every type
constexpr int64_t kAhead = 512;  // elements between use and prefetch
constexpr int64_t kLine = 64;

// How many lanes of a vector a step uses. All is known to the compiler, so its loads and stores are
// single instructions.
struct All {
  static constexpr size_t count() { return kWidth; }
};
struct First {
  size_t lanes;
  size_t count() const { return lanes; }
};

template <int Bytes>
struct Element {
  static constexpr int bytes = Bytes;

  static TESSERA_INLINE void* at(void* p, int64_t i) { return static_cast<char*>(p) + i * bytes; }
  static TESSERA_INLINE const void* at(const void* p, int64_t i) { return static_cast<const char*>(p) + i * bytes; }
  template <class Raw, class Lanes>
  static TESSERA_INLINE Raw read(const void* p, int64_t i, Lanes lanes) {
    Raw raw{};
    memcpy(&raw, static_cast<const char*>(p) + i * bytes, lanes.count() * bytes);
    return raw;
  }
  template <class Raw, class Lanes>
  static TESSERA_INLINE void write(void* p, int64_t i, Lanes lanes, const Raw& raw) {
    memcpy(static_cast<char*>(p) + i * bytes, &raw, lanes.count() * bytes);
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
  static constexpr bool stochastic = false;
  template <class Lanes>
  static TESSERA_INLINE F load(const void* p, int64_t i, Lanes lanes) {
    return read<F>(p, i, lanes);
  }
  template <class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, F x) {
    write(p, i, lanes, x);
  }
};

// The 16-bit conversions give the bits of their namesakes in convert.h.
struct Bf16 : Element<2> {
  static constexpr bool stochastic = false;
  template <class Lanes>
  static TESSERA_INLINE F load(const void* p, int64_t i, Lanes lanes) {
    return (F)(widen_u16(read<H>(p, i, lanes)) << 16);
  }
  // Nearest even; a NaN stays one because its quiet bit is set instead of a rounding carry.
  template <class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, F x) {
    const U bits = (U)x;
    store_sum(p, i, lanes, bits, 0x7fffu + ((bits >> 16) & 1u));
  }

 protected:
  template <class Lanes>
  static TESSERA_INLINE void store_sum(void* p, int64_t i, Lanes lanes, U bits, U added) {
    const U quiet = (bits >> 16) | 0x40u;
    write(p, i, lanes, narrow_u16((bits & 0x7fffffffu) > 0x7f800000u ? quiet : (bits + added) >> 16));
  }
};

struct Bf16Stochastic : Bf16 {
  static constexpr bool stochastic = true;
  // Above the largest finite value, half a unit is added: to nearest, where the only tie goes to infinity.
  template <class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, F x, U random) {
    const U bits = (U)x;
    const U half = random - random + 0x8000u;
    store_sum(p, i, lanes, bits, (bits & 0x7fffffffu) > 0x7f7f0000u ? half : random);
  }
};

struct F16 : Element<2> {
  static constexpr bool stochastic = false;
  template <class Lanes>
  static TESSERA_INLINE F load(const void* p, int64_t i, Lanes lanes) {
    return widen_f16(read<H>(p, i, lanes));
  }
  template <class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, F x) {
    write(p, i, lanes, narrow_f16(x));
  }
};

struct F16Stochastic : F16 {
  static constexpr bool stochastic = true;
  template <class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, F x, U random) {
    const U bits = (U)x, sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    const U normal = sign | ((magnitude - 0x38000000u + (random >> 3)) >> 13);
    const U denormal = sign | ((truncate((F)magnitude * splat(0x1p40f)) + random) >> 16);
    const U nearest = widen_u16(narrow_f16(x));
    const U finite = magnitude < 0x38800000u ? denormal : normal;
    write(p, i, lanes, narrow_u16(magnitude > 0x477fe000u ? nearest : finite));
  }
};

// Stores by the rounding of the type; `random` is not looked at by the nearest ones.
template <class Type, class Lanes>
TESSERA_INLINE void put(void* p, int64_t i, Lanes lanes, F x, U random) {
  if constexpr (Type::stochastic) {
    Type::store(p, i, lanes, x, random);
  } else {
    Type::store(p, i, lanes, x);
  }
}

// random_word() of the elements from `element` on (Note [Random bits] in random.h).
TESSERA_INLINE U random_words(PairKey key, uint32_t element) {
  U x = count_from(element + key.before);
  x ^= x >> 17;
  x *= 0xed5ad4bbu;
  x ^= x >> 11;
  x += key.between;
  x *= 0xac4c1b51u;
  x ^= x >> 15;
  x *= 0x31848babu;
  x ^= x >> 14;
  return x;
}
TESSERA_INLINE U low_streams(U words) {
  return words & 0xffffu;
}
TESSERA_INLINE U upper_streams(U words) {
  return words >> 16;
}

// A stream that is not there.
struct None {
  template <class Lanes>
  static TESSERA_INLINE void store(void*, int64_t, Lanes, F) {}
  static TESSERA_INLINE void prefetch(const void*, int64_t) {}
};

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

// step(i, lanes) for every vector of [0, n); prefetch(i) once per chunk.
template <class Prefetch, class Step>
TESSERA_INLINE void for_each_vector(int64_t n, const Prefetch& prefetch, const Step& step) {
  int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk) {
    prefetch(i + kAhead);
#pragma GCC unroll 4
    for (int64_t k = 0; k < kChunk; k += kWidth)
      step(i + k, All{});
  }
  for (; i + kWidth <= n; i += kWidth)
    step(i, All{});
  if (i < n) step(i, First{static_cast<size_t>(n - i)});
}

}  // namespace
}  // namespace tessera::kernels

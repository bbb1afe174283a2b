// Element types and the loop of the vector kernels, over the vectors of an isa_*.h.
#pragma once

#include <cstdint>
#include <cstring>

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
  template <class Lanes>
  static TESSERA_INLINE F load(const void* p, int64_t i, Lanes lanes) {
    return read<F>(p, i, lanes);
  }
  template <class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, F x) {
    write(p, i, lanes, x);
  }
};

struct Bf16 : Element<2> {
  template <class Lanes>
  static TESSERA_INLINE F load(const void* p, int64_t i, Lanes lanes) {
    return (F)(widen_u16(read<H>(p, i, lanes)) << 16);
  }
  // Nearest even; a NaN stays one because its quiet bit is set instead of a rounding carry.
  template <class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, F x) {
    const U bits = (U)x;
    const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const U quiet = (bits >> 16) | 0x40u;
    write(p, i, lanes, narrow_u16((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded));
  }
};

struct F16 : Element<2> {
  template <class Lanes>
  static TESSERA_INLINE F load(const void* p, int64_t i, Lanes lanes) {
    return widen_f16(read<H>(p, i, lanes));
  }
  template <class Lanes>
  static TESSERA_INLINE void store(void* p, int64_t i, Lanes lanes, F x) {
    write(p, i, lanes, narrow_f16(x));
  }
};

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

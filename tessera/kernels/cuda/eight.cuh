// What a thread works on: eight elements beside each other, the same in every stream of a pass (weights, gradients,
// states), each stream accessed 16 bytes at a time.
//
// Note [Eights]
//   A range of n elements is cut so that an eight begins at a multiple of 16 bytes in all of its streams. The first one may
//   begin before the range and the last one end behind it: those two, and every eight where the streams agree on no such
//   cut, are accessed element by element. What is done between loads and stores is the same.
//   A pass loads all of its streams before it computes, and stores last: a thread waits for memory once. All are the first to
//   leave the caches (.cs): a pass over a model is longer than they are.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "tessera/kernels/element.h"

namespace tessera::kernels::cuda {

constexpr int kEight = 8;
constexpr int kThreads = 256;  // threads of a block, as a rule

// Eight elements as they lie in memory.
template <DType dtype>
struct Eight {
  using Stored = std::conditional_t<dtype == DType::F32, uint32_t, uint16_t>;
  static constexpr int kAccesses = sizeof(Stored) / 2;  // of 16 bytes

  __device__ Stored bits(int k) const {
    if constexpr (dtype == DType::F32) {
      return word[k];
    } else {
      return static_cast<Stored>(word[k / 2] >> (16 * (k % 2)));
    }
  }
  __device__ void set_bits(int k, Stored bits) {
    if constexpr (dtype == DType::F32) {
      word[k] = bits;
    } else if (k % 2 == 0) {
      word[k / 2] = (word[k / 2] & 0xffff0000u) | bits;
    } else {
      word[k / 2] = (word[k / 2] & 0xffffu) | uint32_t{bits} << 16;
    }
  }
  __device__ float value(int k) const {
    if constexpr (dtype == DType::F32) {
      return std::bit_cast<float>(word[k]);
    } else {
      return from_half(bits(k), dtype);
    }
  }

  // Rounds to nearest. Decisions that only rare values need are made once for all eight, here and below.
  __device__ void set(const float (&values)[kEight]) {
    if constexpr (dtype == DType::F32) {
      set_each([&](int k) { return std::bit_cast<uint32_t>(values[k]); });
    } else if (dtype == DType::BF16 && all(values, [](float value) { return !is_nan(value); })) {
      set_each([&](int k) { return bf16_from_number(values[k]); });
    } else {
      set_each([&](int k) { return to_half(values[k], dtype); });
    }
  }
  // Rounds by the 16 random bits random(k).
  template <class Random>
  __device__ void set_stochastic(const float (&values)[kEight], const Random& random) {
    if constexpr (dtype == DType::F32) {
      set(values);
    } else if (dtype == DType::BF16 && all(values, [](float value) { return is_within_bf16(value); })) {
      set_each([&](int k) { return bf16_stochastic_within(values[k], random(k)); });
    } else {
      set_each([&](int k) { return to_half_stochastic(values[k], dtype, random(k)); });
    }
  }

  uint32_t word[4 * kAccesses] = {};

 private:
  template <class F>
  __device__ void set_each(const F& bits_of) {
#pragma unroll
    for (int k = 0; k < kEight; ++k)
      set_bits(k, bits_of(k));
  }
  template <class F>
  __device__ static bool all(const float (&values)[kEight], const F& holds) {
    bool result = true;
#pragma unroll
    for (int k = 0; k < kEight; ++k)
      result &= holds(values[k]);
    return result;
  }
};

// Eight elements of a split master (Note [Split master] in convert.h).
struct SplitEight {
  Eight<DType::BF16> weight, residual;

  __device__ float value(int k) const { return join_float({weight.bits(k), residual.bits(k)}); }
  __device__ void set(const float (&values)[kEight]) {
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      const SplitFloat halves = split_float(values[k]);
      weight.set_bits(k, halves.weight);
      residual.set_bits(k, halves.residual);
    }
  }
};

// An eight that is all there, aligned in every stream.
struct Whole {
  int begin;

  template <DType dtype>
  __device__ void load(Eight<dtype>& eight, const void* stream) const {
    const auto* at = reinterpret_cast<const uint4*>(static_cast<const typename Eight<dtype>::Stored*>(stream) + begin);
#pragma unroll
    for (int a = 0; a < Eight<dtype>::kAccesses; ++a) {
      const uint4 loaded = __ldcs(at + a);
      eight.word[4 * a] = loaded.x;
      eight.word[4 * a + 1] = loaded.y;
      eight.word[4 * a + 2] = loaded.z;
      eight.word[4 * a + 3] = loaded.w;
    }
  }

  template <DType dtype>
  __device__ void store(const Eight<dtype>& eight, void* stream) const {
    auto* at = reinterpret_cast<uint4*>(static_cast<typename Eight<dtype>::Stored*>(stream) + begin);
#pragma unroll
    for (int a = 0; a < Eight<dtype>::kAccesses; ++a) {
      __stcs(at + a, uint4{eight.word[4 * a], eight.word[4 * a + 1], eight.word[4 * a + 2], eight.word[4 * a + 3]});
    }
  }
};

// Any eight: the elements of it that are in [0, n). The others are zero.
struct Piece {
  int begin, n;

  __device__ bool has(int k) const { return begin + k >= 0 && begin + k < n; }

  template <DType dtype>
  __device__ void load(Eight<dtype>& eight, const void* stream) const {
    using Stored = typename Eight<dtype>::Stored;
#pragma unroll
    for (int k = 0; k < kEight; ++k)
      eight.set_bits(k, has(k) ? read<Stored>(stream, begin + k) : Stored{0});
  }

  template <DType dtype>
  __device__ void store(const Eight<dtype>& eight, void* stream) const {
#pragma unroll
    for (int k = 0; k < kEight; ++k)
      if (has(k)) write(stream, begin + k, eight.bits(k));
  }
};

// The most elements of a range that is cut into eights, so that 32 bits number them: larger ranges are several. A multiple of
// kSumBlock. Less in tests.
#ifdef TESSERA_MOST_ELEMENTS
constexpr int kMostElements = TESSERA_MOST_ELEMENTS;
#else
constexpr int kMostElements = 1 << 30;
#endif

// Calls f(at, count) for pieces of n elements, in order.
template <class F>
void for_pieces(int64_t n, const F& f) {
  for (int64_t at = 0; at < n; at += kMostElements)
    f(at, static_cast<int>(std::min<int64_t>(kMostElements, n - at)));
}

// A range, cut into eights.
struct Eights {
  int n = 0;
  int before = 0;        // so many elements of the first eight are not there
  bool aligned = false;  // the others begin at multiples of 16 bytes

  __host__ __device__ int count() const { return (n + before + kEight - 1) / kEight; }
  int64_t blocks() const { return (count() + kThreads - 1) / kThreads; }

  // Calls f(Whole) or f(Piece) for the eight that begins at `begin`.
  template <class F>
  __device__ void access(int begin, const F& f) const {
    if (aligned && begin >= 0 && begin + kEight <= n) {
      f(Whole{begin});
    } else {
      f(Piece{begin, n});
    }
  }
};

// Element 0 of a stream; null where a pass has no such stream.
struct Start {
  const void* at;
  DType dtype;
};

inline Eights eights_of(int n, std::initializer_list<Start> streams) {
  const auto fits = [&](int before) {
    return std::all_of(streams.begin(), streams.end(), [&](const Start& stream) {
      return (reinterpret_cast<uintptr_t>(stream.at) - before * size_of(stream.dtype)) % 16 == 0 ||
             stream.at == nullptr;
    });
  };
  for (int before = 0; before < kEight; ++before)
    if (fits(before)) return {n, before, true};
  return {n, 0, false};
}

}  // namespace tessera::kernels::cuda

// Element types, rounding and random keys of the kernels. Kernels know pointers, counts and scalars: no tensors, no
// torch headers.
#pragma once

#include <cstddef>
#include <cstdint>

// A function of single elements: for the host and, where a CUDA compiler reads it, for devices. Always inlined: no copy
// of it exists that was compiled for one instruction set only.
#ifdef __CUDACC__
#define TESSERA_ELEMENT __host__ __device__ __forceinline__
#else
#define TESSERA_ELEMENT inline __attribute__((always_inline))
#endif

namespace tessera::kernels {

enum class DType : uint8_t { F32, BF16, F16 };

constexpr size_t size_of(DType dtype) {
  return dtype == DType::F32 ? 4 : 2;
}

// Nearest: ties to even. Stochastic: up or down with the probability that makes the mean exact (convert.h).
enum class Rounding : uint8_t { Nearest, Stochastic };

constexpr int64_t kSumLanes = 32;  // lanes of sum_of_squares() in elementwise.h

// Source of random bits, which depend on these fields and the element's index only (random.h), so on no split into ranges,
// threads or ranks.
struct RandomKey {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint64_t first = 0;  // global index of element 0 of the range
};

}  // namespace tessera::kernels

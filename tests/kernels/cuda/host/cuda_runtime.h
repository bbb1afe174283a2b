// The part of CUDA that the kernels and their tests use, for the same .cu files compiled as C++: device memory is host
// memory, and a launch runs the threads of a grid one after the other. Enough for kernels without shared memory and
// barriers, which ours are. Grids have few blocks, so that the kernels' loops over a grid go round.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#undef __builtin_assume
#define __builtin_assume(condition) ((condition) ? void() : std::abort())

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 gridDim, blockIdx, threadIdx;

using cudaStream_t = struct cudaStream*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInsufficientDriver };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
#define CUDART_VERSION 13000
#define __CUDA_ARCH_LIST__ 800, 900
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace cuda_on_host {
constexpr unsigned kMostBlocks = 3;
inline cudaError_t next_error = cudaSuccess;  // what launches and copies to come return instead of doing something
inline int driver = 13000, card = 90;         // the version that the driver serves; 0: there is none
}  // namespace cuda_on_host

inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (cuda_on_host::next_error == cudaSuccess) std::memcpy(to, from, bytes);
  return cuda_on_host::next_error;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cuda_on_host::driver < CUDART_VERSION ? cudaErrorInsufficientDriver : cudaSuccess;
}

inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = cuda_on_host::driver;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? cuda_on_host::card / 10 : cuda_on_host::card % 10;
  return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument";
}

template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const std::type_identity_t<Parameters>&... arguments) {
  if (cuda_on_host::next_error != cudaSuccess) return cuda_on_host::next_error;
  gridDim.x = std::min(config->gridDim.x, cuda_on_host::kMostBlocks);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < config->blockDim.x; ++threadIdx.x)
      kernel(arguments...);
  }
  return cudaSuccess;
}

// The part of CUDA that the kernels and their tests use, for the same .cu files compiled as C++: device memory is host
// memory, and a launch runs the threads of a grid one after the other. A kernel may have one barrier, before which it writes
// nothing but shared memory: the threads of its blocks are run up to it, and then once more as a whole.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define TESSERA_MOST_ELEMENTS 8192  // so that ranges are cut

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 blockIdx, threadIdx;

// Accesses of 16 bytes: the sanitizers see to their alignment.
struct alignas(16) [[gnu::may_alias]] uint4 {
  unsigned x, y, z, w;
};
inline uint4 __ldcs(const uint4* from) {
  return *from;
}
inline void __stcs(uint4* to, uint4 value) {
  *to = value;
}

using cudaStream_t = struct cudaStream*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInsufficientDriver, cudaErrorStreamCaptureImplicit };
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated
};
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
struct Barrier {};
inline bool beyond_barriers = false;
inline int64_t launches = 0;
inline cudaError_t next_error = cudaSuccess;  // what launches and copies to come return instead of doing something
inline cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
inline int driver = 13000, card = 90;  // the version that the driver serves; 0: there is none
}  // namespace cuda_on_host

inline void __syncthreads() {
  if (!cuda_on_host::beyond_barriers) throw cuda_on_host::Barrier{};
}

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

inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = cuda_on_host::capture;
  return stream == nullptr && *status != cudaStreamCaptureStatusNone ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
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
  ++cuda_on_host::launches;
  const auto reaches_barrier = [&] {
    try {
      kernel(arguments...);
    } catch (cuda_on_host::Barrier) {
      return true;
    }
    return false;
  };
  for (blockIdx.x = 0; blockIdx.x < config->gridDim.x; ++blockIdx.x) {
    cuda_on_host::beyond_barriers = false;
    bool barrier = false;
    for (threadIdx.x = 0; threadIdx.x < config->blockDim.x; ++threadIdx.x)
      barrier |= reaches_barrier();
    cuda_on_host::beyond_barriers = true;
    for (threadIdx.x = 0; barrier && threadIdx.x < config->blockDim.x; ++threadIdx.x)
      kernel(arguments...);
  }
  return cudaSuccess;
}

// One thread an element, any number of elements.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tessera::kernels::cuda {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 1 << 20;  // at most; larger ranges go round

template <class Body>
__global__ void __launch_bounds__(kThreads) each_element(int64_t n, Body body) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step)
    body(i);
}

// body(i), a __device__ function object, for i of [0, n).
template <class Body>
void launch(int64_t n, void* stream, const Body& body) {
  if (n <= 0) return;
  const int64_t blocks = std::min(kBlocks, (n + kThreads - 1) / kThreads);
  cudaLaunchConfig_t config{};  // not <<<...>>>: this is C++ for every compiler
  config.gridDim.x = static_cast<unsigned>(blocks);
  config.blockDim.x = kThreads;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, each_element<Body>, n, body);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("[kernels.cuda] a kernel was not launched: ") + cudaGetErrorString(error));
  }
}

}  // namespace tessera::kernels::cuda

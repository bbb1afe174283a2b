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
__global__ void __launch_bounds__(kThreads) each_element(int64_t begin, int64_t end, Body body) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = begin + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step)
    body(i);
}

// body(i), a __device__ function object, for i of [begin, end).
template <class Body>
void launch(int64_t begin, int64_t end, void* stream, const Body& body) {
  if (begin >= end) return;
  const int64_t blocks = std::min(kBlocks, (end - begin + kThreads - 1) / kThreads);
  each_element<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(begin, end, body);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("[kernels.cuda] a kernel was not launched: ") + cudaGetErrorString(error));
  }
}

}  // namespace tessera::kernels::cuda

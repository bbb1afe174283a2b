// Launches with errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace tessera::kernels::cuda {

// How the blocks of a launch are shared among parts of its work, which have a block at least.
template <int most>
struct Shares {
  int count = 0;         // parts
  unsigned blocks = 0;   // of all of them
  unsigned first[most];  // first block of each part

  bool full() const { return count == most; }
  int add(int64_t more) {
    first[count] = blocks;
    blocks += static_cast<unsigned>(more);
    return count++;
  }

  // The part that a block works on, and which of the part's blocks it is.
  struct Share {
    int part;
    unsigned block;
  };
  __device__ Share of(unsigned block) const {
    int part = 0;
    for (int end = count; part + 1 < end;) {
      const int middle = (part + end) / 2;
      (first[middle] <= block ? part : end) = middle;
    }
    return {part, block - first[part]};
  }
};

constexpr size_t kMostArguments = 4096;  // bytes that any driver takes

// Launches blocks of `threads`; none is fine.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, void* stream,
            const std::type_identity_t<Parameters>&... arguments) {
  if (blocks <= 0) return;
  cudaLaunchConfig_t config{};  // not <<<...>>>: this is C++ for every compiler
  config.gridDim.x = static_cast<unsigned>(blocks);
  config.blockDim.x = static_cast<unsigned>(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("[kernels.cuda] a kernel was not launched: ") + cudaGetErrorString(error));
  }
}

}  // namespace tessera::kernels::cuda

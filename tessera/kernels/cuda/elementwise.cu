// Element-wise passes: one thread an element.
#include "tessera/kernels/cuda/cuda.h"
#include "tessera/kernels/cuda/launch.cuh"
#include "tessera/kernels/element.h"

namespace tessera::kernels::cuda {
namespace {

template <bool add, bool stochastic>
struct Scaled {
  void* dst;
  const void* src;
  DType dst_dtype, src_dtype;
  float scale;
  uint64_t first;
  StepKey key;

  __device__ void operator()(int64_t i) const {
    const float x = load(src, src_dtype, i);
    const float value = add ? std::fma(scale, x, load(dst, dst_dtype, i)) : x * scale;
    if (stochastic) {
      const uint32_t bits = random_bits(key, kGradient, first + static_cast<uint64_t>(i));
      store_stochastic(dst, dst_dtype, i, value, bits);
    } else {
      store(dst, dst_dtype, i, value);
    }
  }
};

struct Split {
  void* weight;
  void* residual;
  const float* src;

  __device__ void operator()(int64_t i) const {
    const SplitFloat halves = split_float(src[i]);
    write(weight, i, halves.weight);
    write(residual, i, halves.residual);
  }
};

struct Join {
  float* dst;
  const void* weight;
  const void* residual;

  __device__ void operator()(int64_t i) const {
    dst[i] = join_float({read<uint16_t>(weight, i), read<uint16_t>(residual, i)});
  }
};

}  // namespace

std::string why_unusable() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return std::string("CUDA has no device: ") + cudaGetErrorString(error);
  return devices > 0 ? "" : "CUDA has no device";
}

void scaled_copy(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n, void* stream) {
  if (scale == 1.0f && dst_dtype == src_dtype) {  // every bit is kept
    if (dst == src || n == 0) return;
    const cudaError_t error = cudaMemcpyAsync(dst, src, static_cast<size_t>(n) * size_of(dst_dtype),
                                              cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) {
      throw std::runtime_error(std::string("[kernels.cuda] a copy was not started: ") + cudaGetErrorString(error));
    }
    return;
  }
  launch(n, stream, Scaled<false, false>{dst, src, dst_dtype, src_dtype, scale, 0, {}});
}

void scaled_add(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n, void* stream) {
  launch(n, stream, Scaled<true, false>{dst, src, dst_dtype, src_dtype, scale, 0, {}});
}

void scaled_copy_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                            const RandomKey& random, void* stream) {
  const StepKey key = step_key(random);
  launch(n, stream, Scaled<false, true>{dst, src, dst_dtype, src_dtype, scale, random.first, key});
}

void scaled_add_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                           const RandomKey& random, void* stream) {
  const StepKey key = step_key(random);
  launch(n, stream, Scaled<true, true>{dst, src, dst_dtype, src_dtype, scale, random.first, key});
}

void split(void* weight_bf16, void* residual, const float* src, int64_t n, void* stream) {
  launch(n, stream, Split{weight_bf16, residual, src});
}

void join(float* dst, const void* weight_bf16, const void* residual, int64_t n, void* stream) {
  launch(n, stream, Join{dst, weight_bf16, residual});
}

}  // namespace tessera::kernels::cuda

// Element-wise passes: one thread an element.
#include <algorithm>
#include <iterator>

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

constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // what this was compiled for: 800 is sm_80

// "13.0" of 13000.
std::string toolkit(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string why_no_device(cudaError_t error) {
  int driver = 0;
  if (error != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess)
    return std::string(": ") + cudaGetErrorString(error);
  if (driver == 0) return ": there is no driver (libcuda.so.1); install NVIDIA's";
  return ": the driver serves CUDA " + toolkit(driver) + " and these kernels need " + toolkit(CUDART_VERSION) +
         "; update the driver, or build Tessera with a toolkit that is no newer than it";
}

}  // namespace

std::string why_unusable() {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess)
    return "CUDA has no device" + why_no_device(error);
  if (devices == 0) return "CUDA has no device";
  const int oldest = *std::min_element(std::begin(kArchitectures), std::end(kArchitectures)) / 10;
  int newest_card = 0;
  for (int device = 0; device < devices; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    newest_card = std::max(newest_card, 10 * major + minor);
  }
  if (newest_card >= oldest) return "";
  constexpr int kOldestOf13 = 75;
  const bool dropped = newest_card < kOldestOf13 && CUDART_VERSION >= 13000;
  return "the card is of architecture " + std::to_string(newest_card) + ", and these kernels were built for " +
         std::to_string(oldest) +
         " and later; build Tessera with CMAKE_CUDA_ARCHITECTURES=" + std::to_string(newest_card) +
         (dropped ? " and a toolkit of CUDA 12, the last one that knows it" : "");
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

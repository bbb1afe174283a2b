// Element-wise passes: a thread has an eight of each stream (Note [Eights]).
#include "tessera/kernels/cuda/cuda.h"
#include "tessera/kernels/cuda/draws.cuh"
#include "tessera/kernels/cuda/eight.cuh"
#include "tessera/kernels/cuda/launch.cuh"

namespace tessera::kernels::cuda {
namespace {

// Calls pass(eights, begin) for the eight that begins at an element, which may be before 0.
template <class Pass>
__global__ void __launch_bounds__(kThreads) each_eight(Eights eights, Pass pass) {
  const int eight = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (eight < eights.count()) pass(eights, eight * kEight - eights.before);
}

template <class Pass>
void launch_pass(const Eights& eights, const Pass& pass, void* stream) {
  launch(each_eight<Pass>, eights.blocks(), kThreads, stream, eights, pass);
}

template <bool add, Rounding rounding, DType dst_dtype, DType src_dtype>
struct Scaled {
  void* dst;
  const void* src;
  float scale;
  StepKey key;
  Numbers numbers;

  __device__ void operator()(const Eights& eights, int begin) const {
    Eight<dst_dtype> to;
    Eight<src_dtype> from;
    eights.access(begin, [&](const auto& access) {
      access.load(from, src);
      if constexpr (add) access.load(to, dst);
    });
    float values[kEight];
#pragma unroll
    for (int k = 0; k < kEight; ++k)
      values[k] = add ? std::fma(scale, from.value(k), to.value(k)) : from.value(k) * scale;
    if constexpr (rounding == Rounding::Stochastic) {
      const Draws<kGradient, kGradient> draws(key, numbers, begin);
      to.set_stochastic(values, [&](int k) { return draws.of(kGradient, k); });
    } else {
      to.set(values);
    }
    eights.access(begin, [&](const auto& access) { access.store(to, dst); });
  }
};

struct Split {
  void* weight;
  void* residual;
  const void* src;

  __device__ void operator()(const Eights& eights, int begin) const {
    Eight<DType::F32> whole;
    SplitEight halves;
    eights.access(begin, [&](const auto& access) { access.load(whole, src); });
    float values[kEight];
#pragma unroll
    for (int k = 0; k < kEight; ++k)
      values[k] = whole.value(k);
    halves.set(values);
    eights.access(begin, [&](const auto& access) {
      access.store(halves.weight, weight);
      access.store(halves.residual, residual);
    });
  }
};

struct Join {
  void* dst;
  const void* weight;
  const void* residual;

  __device__ void operator()(const Eights& eights, int begin) const {
    SplitEight halves;
    Eight<DType::F32> whole;
    eights.access(begin, [&](const auto& access) {
      access.load(halves.weight, weight);
      access.load(halves.residual, residual);
    });
    float values[kEight];
#pragma unroll
    for (int k = 0; k < kEight; ++k)
      values[k] = halves.value(k);
    whole.set(values);
    eights.access(begin, [&](const auto& access) { access.store(whole, dst); });
  }
};

template <class T>
T* at_element(T* p, DType dtype, int64_t i) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Byte*>(p) + i * static_cast<int64_t>(size_of(dtype));
}

struct ScaledArguments {
  void* dst;
  DType dst_dtype;
  const void* src;
  DType src_dtype;
  float scale;
  int64_t n;
  RandomKey random;
  void* stream;
};

template <bool add, Rounding rounding, DType dst_dtype, DType src_dtype>
void launch_scaled(const ScaledArguments& a) {
  const StepKey key = step_key(a.random);
  for_pieces(a.n, [&](int64_t at, int count) {
    void* dst = at_element(a.dst, dst_dtype, at);
    const void* src = at_element(a.src, src_dtype, at);
    const Numbers numbers = Numbers::one_run(a.random.first + static_cast<uint64_t>(at));
    launch_pass(eights_of(count, {{dst, dst_dtype}, {src, src_dtype}}),
                Scaled<add, rounding, dst_dtype, src_dtype>{dst, src, a.scale, key, numbers}, a.stream);
  });
}

template <bool add, Rounding rounding, DType dst_dtype>
void launch_by_src(const ScaledArguments& a) {
  if (a.src_dtype == DType::F32) return launch_scaled<add, rounding, dst_dtype, DType::F32>(a);
  if (a.src_dtype == DType::BF16) return launch_scaled<add, rounding, dst_dtype, DType::BF16>(a);
  launch_scaled<add, rounding, dst_dtype, DType::F16>(a);
}

// fp32 is not rounded.
template <bool add, Rounding rounding>
void launch_by_dst(const ScaledArguments& a) {
  if (a.dst_dtype == DType::F32) return launch_by_src<add, Rounding::Nearest, DType::F32>(a);
  if (a.dst_dtype == DType::BF16) return launch_by_src<add, rounding, DType::BF16>(a);
  launch_by_src<add, rounding, DType::F16>(a);
}

}  // namespace

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
  launch_by_dst<false, Rounding::Nearest>({dst, dst_dtype, src, src_dtype, scale, n, {}, stream});
}

void scaled_add(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n, void* stream) {
  launch_by_dst<true, Rounding::Nearest>({dst, dst_dtype, src, src_dtype, scale, n, {}, stream});
}

void scaled_copy_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                            const RandomKey& random, void* stream) {
  launch_by_dst<false, Rounding::Stochastic>({dst, dst_dtype, src, src_dtype, scale, n, random, stream});
}

void scaled_add_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                           const RandomKey& random, void* stream) {
  launch_by_dst<true, Rounding::Stochastic>({dst, dst_dtype, src, src_dtype, scale, n, random, stream});
}

void split(void* weight_bf16, void* residual, const float* src, int64_t n, void* stream) {
  for_pieces(n, [&](int64_t at, int count) {
    const Split pass{at_element(weight_bf16, DType::BF16, at), at_element(residual, DType::BF16, at), src + at};
    launch_pass(eights_of(count, {{pass.weight, DType::BF16}, {pass.residual, DType::BF16}, {pass.src, DType::F32}}),
                pass, stream);
  });
}

void join(float* dst, const void* weight_bf16, const void* residual, int64_t n, void* stream) {
  for_pieces(n, [&](int64_t at, int count) {
    const Join pass{dst + at, at_element(weight_bf16, DType::BF16, at), at_element(residual, DType::BF16, at)};
    launch_pass(eights_of(count, {{pass.dst, DType::F32}, {pass.weight, DType::BF16}, {pass.residual, DType::BF16}}),
                pass, stream);
  });
}

}  // namespace tessera::kernels::cuda

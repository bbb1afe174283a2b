#include "tessera/shard/dtype.h"

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/kernels/elementwise.h"

namespace tessera::shard {

namespace {

constexpr int64_t kGrain = 1 << 16;  // elements a thread should at least get
constexpr int64_t kAlign = 64;

template <class Kernel>
void over_threads(Kernel kernel, Memory dst, Memory src, double scale, int64_t n) {
  char* out = static_cast<char*>(dst.data);
  const char* in = static_cast<const char*>(src.data);
  const auto out_size = static_cast<int64_t>(kernels::size_of(dst.dtype));
  const auto in_size = static_cast<int64_t>(kernels::size_of(src.dtype));
  parallel_ranges(n, kGrain, kAlign, [&](int64_t begin, int64_t end) {
    kernel(out + begin * out_size, dst.dtype, in + begin * in_size, src.dtype, static_cast<float>(scale), end - begin);
  });
}

void check_pair(const at::Tensor& dst, const at::Tensor& src) {
  TESSERA_ASSERT(dst.numel() == src.numel() && dst.is_contiguous() && src.is_contiguous());
}

}  // namespace

kernels::DType kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::DType::F32;
    case at::kBFloat16:
      return kernels::DType::BF16;
    case at::kHalf:
      return kernels::DType::F16;
    default:
      TESSERA_CHECK_BUILT(false, "shard.dtype", "model states of dtype ", dtype,
                          " are not supported; use float32, bfloat16 or float16");
  }
}

void check_device(c10::Device device) {
  TESSERA_CHECK_BUILT(device.is_cpu(), "shard.dtype", "parameters on device '", device,
                      "': this build has kernels for CPU tensors only; move the model to the CPU");
}

Memory memory_of(const at::Tensor& tensor, int64_t offset) {
  const auto dtype = kernel_dtype(tensor.scalar_type());
  const int64_t bytes = offset * static_cast<int64_t>(kernels::size_of(dtype));
  return {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + bytes, dtype};
}

void scaled_copy(Memory dst, Memory src, double scale, int64_t n) {
  over_threads(kernels::scaled_copy, dst, src, scale, n);
}

void scaled_add(Memory dst, Memory src, double scale, int64_t n) {
  over_threads(kernels::scaled_add, dst, src, scale, n);
}

void scaled_copy(const at::Tensor& dst, const at::Tensor& src, double scale) {
  check_pair(dst, src);
  scaled_copy(memory_of(dst), memory_of(src), scale, dst.numel());
}

void scaled_add(const at::Tensor& dst, const at::Tensor& src, double scale) {
  check_pair(dst, src);
  scaled_add(memory_of(dst), memory_of(src), scale, dst.numel());
}

void fill_zero(const at::Tensor& dst) {
  if (dst.numel() > 0) std::memset(dst.data_ptr(), 0, dst.nbytes());
}

}  // namespace tessera::shard

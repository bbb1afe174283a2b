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
void over_threads(Kernel kernel, const at::Tensor& dst, const at::Tensor& src, double scale) {
  TESSERA_ASSERT(dst.numel() == src.numel() && dst.is_contiguous() && src.is_contiguous());
  const auto dst_type = kernel_dtype(dst.scalar_type());
  const auto src_type = kernel_dtype(src.scalar_type());
  char* out = static_cast<char*>(dst.data_ptr());
  const char* in = static_cast<const char*>(src.const_data_ptr());
  parallel_ranges(dst.numel(), kGrain, kAlign, [&](int64_t begin, int64_t end) {
    kernel(out + begin * kernels::size_of(dst_type), dst_type, in + begin * kernels::size_of(src_type), src_type,
           static_cast<float>(scale), end - begin);
  });
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

void scaled_copy(const at::Tensor& dst, const at::Tensor& src, double scale) {
  over_threads(kernels::scaled_copy, dst, src, scale);
}

void scaled_add(const at::Tensor& dst, const at::Tensor& src, double scale) {
  over_threads(kernels::scaled_add, dst, src, scale);
}

void fill_zero(const at::Tensor& dst) {
  if (dst.numel() > 0) std::memset(dst.data_ptr(), 0, dst.nbytes());
}

}  // namespace tessera::shard

#include "tessera/shard/dtype.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zero.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/kernels/elementwise.h"
#include "tessera/kernels/split.h"
#include "tessera/shard/device.h"

namespace tessera::shard {

namespace {

constexpr int64_t kGrain = 1 << 16;  // elements a thread should at least get
constexpr int64_t kAlign = 64;

// kernel(dst, src, begin, n) for every thread's elements.
template <class Kernel>
void over_threads(Memory dst, Memory src, int64_t n, const Kernel& kernel) {
  const auto out_size = static_cast<int64_t>(kernels::size_of(dst.dtype));
  const auto in_size = static_cast<int64_t>(kernels::size_of(src.dtype));
  parallel_ranges(n, kGrain, kAlign, [&](int64_t begin, int64_t end) {
    kernel(static_cast<char*>(dst.data) + begin * out_size, static_cast<const char*>(src.data) + begin * in_size, begin,
           end - begin);
  });
}

kernels::RandomKey advanced(kernels::RandomKey random, int64_t elements) {
  random.first += static_cast<uint64_t>(elements);
  return random;
}

void check_pair(const at::Tensor& dst, const at::Tensor& src) {
  TESSERA_ASSERT(dst.numel() == src.numel() && dst.is_contiguous() && src.is_contiguous() &&
                 dst.device() == src.device());
}

// Runs the kernel of a table, or its stochastic twin.
template <bool add>
void scaled(Memory dst, Memory src, double scale, int64_t n, const Random& random) {
  TESSERA_ASSERT(dst.device == src.device);
  const auto factor = static_cast<float>(scale);
  if (dst.device.is_cpu()) {
    over_threads(dst, src, n, [&](void* to, const void* from, int64_t begin, int64_t count) {
      if (random) {
        constexpr auto kernel = add ? kernels::scaled_add_stochastic : kernels::scaled_copy_stochastic;
        kernel(to, dst.dtype, from, src.dtype, factor, count, advanced(*random, begin));
      } else {
        constexpr auto kernel = add ? kernels::scaled_add : kernels::scaled_copy;
        kernel(to, dst.dtype, from, src.dtype, factor, count);
      }
    });
    return;
  }
  on_device(dst.device, [&](const kernels::DeviceTable& table, void* stream) {
    if (random) {
      const auto kernel = add ? table.scaled_add_stochastic : table.scaled_copy_stochastic;
      kernel(dst.data, dst.dtype, src.data, src.dtype, factor, n, *random, stream);
    } else {
      const auto kernel = add ? table.scaled_add : table.scaled_copy;
      kernel(dst.data, dst.dtype, src.data, src.dtype, factor, n, stream);
    }
  });
}

void check_split(const at::Tensor& whole, const at::Tensor& weight, const at::Tensor& residual) {
  check_pair(whole, weight);
  check_pair(whole, residual);
  TESSERA_CHECK_VALUE(whole.scalar_type() == at::kFloat && weight.scalar_type() == at::kBFloat16 &&
                          residual.scalar_type() == at::kShort,
                      "shard.split", "a split master is float32 as bfloat16 and int16, got ", whole.scalar_type(),
                      " as ", weight.scalar_type(), " and ", residual.scalar_type());
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

Memory memory_of(const at::Tensor& tensor, int64_t offset) {
  const auto dtype = kernel_dtype(tensor.scalar_type());
  const int64_t bytes = offset * static_cast<int64_t>(kernels::size_of(dtype));
  return {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + bytes, dtype, tensor.device()};
}

void scaled_copy(Memory dst, Memory src, double scale, int64_t n, const Random& random) {
  scaled<false>(dst, src, scale, n, random);
}

void scaled_add(Memory dst, Memory src, double scale, int64_t n, const Random& random) {
  scaled<true>(dst, src, scale, n, random);
}

void scaled_copy(const at::Tensor& dst, const at::Tensor& src, double scale, const Random& random) {
  check_pair(dst, src);
  scaled_copy(memory_of(dst), memory_of(src), scale, dst.numel(), random);
}

void scaled_add(const at::Tensor& dst, const at::Tensor& src, double scale, const Random& random) {
  check_pair(dst, src);
  scaled_add(memory_of(dst), memory_of(src), scale, dst.numel(), random);
}

void split_master(const at::Tensor& weight, const at::Tensor& residual, const at::Tensor& from) {
  check_split(from, weight, residual);
  const auto* in = static_cast<const float*>(from.const_data_ptr());
  auto* upper = static_cast<uint16_t*>(weight.data_ptr());
  auto* low = static_cast<uint16_t*>(residual.data_ptr());
  if (!from.is_cpu()) {
    return on_device(from.device(), [&](const kernels::DeviceTable& table, void* stream) {
      table.split(upper, low, in, from.numel(), stream);
    });
  }
  parallel_ranges(from.numel(), kGrain, kAlign, [&](int64_t begin, int64_t end) {
    kernels::split(upper + begin, low + begin, in + begin, end - begin);
  });
}

void join_master(const at::Tensor& to, const at::Tensor& weight, const at::Tensor& residual) {
  check_split(to, weight, residual);
  auto* out = static_cast<float*>(to.data_ptr());
  const auto* upper = static_cast<const uint16_t*>(weight.const_data_ptr());
  const auto* low = static_cast<const uint16_t*>(residual.const_data_ptr());
  if (!to.is_cpu()) {
    return on_device(to.device(), [&](const kernels::DeviceTable& table, void* stream) {
      table.join(out, upper, low, to.numel(), stream);
    });
  }
  parallel_ranges(to.numel(), kGrain, kAlign, [&](int64_t begin, int64_t end) {
    kernels::join(out + begin, upper + begin, low + begin, end - begin);
  });
}

void fill_zero(const at::Tensor& dst) {
  if (!dst.is_cpu()) {
    at::AutoDispatchBelowADInplaceOrView below;  // a memset: no version counts it
    dst.zero_();
  } else if (dst.numel() > 0) {
    std::memset(dst.data_ptr(), 0, dst.nbytes());
  }
}

}  // namespace tessera::shard

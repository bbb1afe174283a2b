#include "tessera/shard/dtype.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::shard {

TEST(Dtype, KernelsServeFloatTypesOfTheCpuOnly) {
  EXPECT_EQ(kernel_dtype(at::kFloat), kernels::DType::F32);
  EXPECT_EQ(kernel_dtype(at::kBFloat16), kernels::DType::BF16);
  EXPECT_EQ(kernel_dtype(at::kHalf), kernels::DType::F16);
  EXPECT_THROW(kernel_dtype(at::kDouble), c10::NotImplementedError);
  EXPECT_NO_THROW(check_device(at::kCPU));
  EXPECT_THROW(check_device(at::Device(at::kMeta)), c10::NotImplementedError);
}

TEST(Dtype, CopiesAndAddsLikeAten) {
  for (const auto dst : {at::kFloat, at::kBFloat16}) {
    for (const auto src : {at::kFloat, at::kBFloat16}) {
      for (const int64_t n : {0, 1, 63, 70000}) {
        const at::Tensor a = at::randn({n}).to(dst), b = at::randn({n}).to(src);
        at::Tensor copied = a.clone(), added = a.clone();
        scaled_copy(copied, b, 0.25);
        scaled_add(added, b, 0.25);
        const at::Tensor scaled = b.to(at::kFloat) * 0.25;
        EXPECT_TRUE(copied.equal(scaled.to(dst)));
        EXPECT_TRUE(added.equal((a.to(at::kFloat) + scaled).to(dst)));
      }
    }
  }
}

}  // namespace tessera::shard

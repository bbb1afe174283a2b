#include "tessera/shard/dtype.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace tessera::shard {

TEST(Dtype, KernelsServeFloatTypes) {
  EXPECT_EQ(kernel_dtype(at::kFloat), kernels::DType::F32);
  EXPECT_EQ(kernel_dtype(at::kBFloat16), kernels::DType::BF16);
  EXPECT_EQ(kernel_dtype(at::kHalf), kernels::DType::F16);
  EXPECT_THROW(kernel_dtype(at::kDouble), c10::NotImplementedError);
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

TEST(Dtype, StochasticSumsAreTheOnesOfEveryCutAndThreadCount) {
  constexpr int64_t n = 200003, cut = 70001;
  const at::Tensor start = at::randn({n}).to(at::kBFloat16), values = at::randn({n}) * 0.01;
  at::Tensor whole = start.clone(), parts = start.clone(), copied = start.clone();
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  scaled_add(whole, values, 0.5, kernels::RandomKey{1, 2, 10});
  at::set_num_threads(3);
  scaled_add(parts.narrow(0, 0, cut), values.narrow(0, 0, cut), 0.5, kernels::RandomKey{1, 2, 10});
  scaled_add(parts.narrow(0, cut, n - cut), values.narrow(0, cut, n - cut), 0.5, kernels::RandomKey{1, 2, 10 + cut});
  at::set_num_threads(before);
  EXPECT_TRUE(whole.equal(parts));
  EXPECT_FALSE(whole.equal((start.to(at::kFloat) + values * 0.5).to(at::kBFloat16)));
  scaled_copy(copied, values, 0.5, kernels::RandomKey{1, 2, 10});
  EXPECT_LT((copied.to(at::kDouble) - values.to(at::kDouble) * 0.5).mean().abs().item<double>(), 1e-6);
  EXPECT_FALSE(copied.equal((values * 0.5).to(at::kBFloat16)));
  at::Tensor exact = start.to(at::kFloat), plain = exact.clone();
  scaled_add(exact, values, 0.5, kernels::RandomKey{1, 2, 10});
  scaled_add(plain, values, 0.5);
  EXPECT_TRUE(exact.equal(plain));
}

TEST(Dtype, SplitMastersJoinToTheSameBits) {
  for (const int64_t n : {0, 1, 63, 200003}) {
    const at::Tensor from = at::randn({n});
    at::Tensor weight = at::empty({n}, at::kBFloat16), residual = at::empty({n}, at::kShort), to = at::empty({n});
    split_master(weight, residual, from);
    join_master(to, weight, residual);
    EXPECT_TRUE(to.equal(from));
    const at::Tensor tie = (from.view(at::kInt).bitwise_and(0xffff) == 0x8000);
    EXPECT_TRUE((weight == from.to(at::kBFloat16)).logical_or(tie).all().item<bool>());
  }
  at::Tensor four = at::zeros({4}), half = four.to(at::kBFloat16), low = four.to(at::kShort);
  EXPECT_THROW(split_master(four, low, four), c10::ValueError);
  EXPECT_THROW(join_master(four, half, half), c10::ValueError);
}

}  // namespace tessera::shard

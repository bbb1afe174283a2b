#include "tessera/zero/hooks/write_count.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera::zero {
namespace {

TEST(WriteCount, WritesAreSeenAndSettingATensorToItselfIsNone) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kByte}) {
    for (const bool trained : {false, true}) {
      if (trained && dtype == at::kByte) continue;
      at::Tensor t = at::ones({3}, dtype).set_requires_grad(trained);
      const at::NoGradGuard no_grad;
      WriteCount count;
      for (int round = 0; round < 2; ++round) {
        count.forget(t);
        EXPECT_FALSE(count.any(t));
        t.fill_(round);
        EXPECT_TRUE(count.any(t));
        count.forget(t);
        t.set_(t);
        EXPECT_FALSE(count.any(t)) << dtype << trained;
        count.forget(t);
        EXPECT_TRUE(count.holds());
      }
      t.fill_(2);
      count.forget_own(t);
      EXPECT_FALSE(count.any(t));
      t.fill_(3);
      EXPECT_TRUE(count.any(t));
      if (dtype == at::kByte) continue;
      t.set_requires_grad(true);  // later: what was planted accumulates its gradient
      const at::AutoGradMode with_grad(true);
      (t * 2).sum().backward();
      EXPECT_TRUE(t.grad().eq(2).all().item<bool>());
    }
  }
}

}  // namespace
}  // namespace tessera::zero

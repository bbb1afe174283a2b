#include "tessera/engine/flops.h"

#include <gtest/gtest.h>
#include <torch/nn/functional.h>
#include <torch/torch.h>

#include <functional>

namespace tessera::engine {
namespace {

// By the formulas, a multiplication and an addition as two.
TEST(FlopCounter, CountsProductsConvolutionsAndAttentions) {
  const at::Tensor x = at::ones({4, 6}), y = at::ones({6, 5}), b = at::ones({3, 4, 6}), image = at::ones({2, 4, 9, 8});
  const at::Tensor q = at::ones({2, 3, 7, 4}), k = at::ones({2, 3, 5, 4}), v = at::ones({2, 3, 5, 8});
  const std::vector<std::pair<std::function<void()>, double>> rows{
      {[&] { x.mm(y); }, 2 * 4 * 6 * 5},
      {[&] { at::addmm(at::ones({5}), x, y); }, 2 * 4 * 6 * 5},
      {[&] { b.matmul(y); }, 2 * 12 * 6 * 5},
      {[&] { b.bmm(b.mT()); }, 2 * 3 * 4 * 6 * 4},
      {[&] { at::baddbmm(at::ones({1}), b, b.mT()); }, 2 * 3 * 4 * 6 * 4},
      {[&] { torch::nn::functional::linear(b, at::ones({5, 6}), at::ones({5})); }, 2 * 12 * 6 * 5},
      // 5 by 4 places out, 6 channels of groups with 2 channels each, 3 by 3 weights
      {[&] { at::conv2d(image, at::ones({6, 2, 3, 3}), {}, 2, 1, 1, 2); }, 2.0 * 2 * 5 * 4 * 6 * 2 * 9},
      {[&] { at::conv_transpose2d(image, at::ones({4, 3, 2, 2})); }, 2.0 * 2 * 9 * 8 * 4 * 3 * 4},
      {[&] { at::scaled_dot_product_attention(q, k, v); }, 2.0 * 2 * 3 * 7 * 5 * (4 + 8)},
      {[&] { x.add(x).relu().sum(); }, 0}};
  for (size_t i = 0; i < rows.size(); ++i) {
    const FlopCounter counter;
    rows[i].first();
    EXPECT_EQ(counter.total(), rows[i].second) << "row " << i;
  }
}

TEST(FlopCounter, TheInnermostOneCounts) {
  const at::Tensor x = at::ones({2, 2});
  const FlopCounter outer;
  x.mm(x);
  {
    const FlopCounter inner;
    x.mm(x);
    EXPECT_EQ(inner.total(), 16);
  }
  x.mm(x);
  EXPECT_EQ(outer.total(), 32);
}

}  // namespace
}  // namespace tessera::engine

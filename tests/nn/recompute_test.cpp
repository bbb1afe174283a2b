// Activation checkpointing: gradients are those without it, and only inputs are kept.
#include "tessera/nn/recompute.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include "tests/support/errors.h"

namespace tessera::nn {
namespace {

using testing::error_of;
using Tensors = std::vector<at::Tensor>;

struct Dropping {
  torch::nn::Linear linear{4, 4};
  torch::nn::Dropout dropout{0.5};

  // The second output does not depend on a parameter.
  Tensors operator()(const Tensors& x) const {
    auto drop = dropout;
    auto own = linear;
    return {at::tanh(drop(own(x[0]))) * x[1], x[0] * 2, x[2]};
  }
  // Gradients of x, y and the weight of a loss that draws random numbers in front of, in and behind the part.
  Tensors gradients(bool again, bool trained_inputs) {
    torch::manual_seed(3);
    linear->zero_grad();
    const at::Tensor x = at::linspace(-1, 1, 12).view({3, 4}).requires_grad_(trained_inputs), y = at::full({3, 4}, 0.7);
    const Tensors inputs{x * at::rand({3, 4}), y, at::arange(3)};
    const Tensors made = again ? recompute(*this, inputs) : (*this)(inputs);
    EXPECT_FALSE(made[2].requires_grad()) << "integers";
    ((made[0] + made[1]) * at::rand({3, 4})).sum().backward();
    const at::Tensor next = at::rand({2});  // the backward has drawn nothing
    return {linear->weight.grad().clone(), linear->bias.grad().clone(), trained_inputs ? x.grad() : y, next};
  }
};

TEST(Recompute, GradientsAreThoseWithoutIt) {
  Dropping part;
  for (const bool trained_inputs : {true, false}) {
    const Tensors expected = part.gradients(false, trained_inputs), got = part.gradients(true, trained_inputs);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::equal(got[i], expected[i])) << trained_inputs << " " << i;
  }
}

TEST(Recompute, OnlyInputsAreKept) {
  c10::weak_intrusive_ptr<c10::TensorImpl> inner(at::ones({1}).getIntrusivePtr());
  int runs = 0;
  const at::Tensor weight = at::ones({3}).requires_grad_(), x = at::ones({3});
  const auto made = recompute(
      [&](const Tensors& inputs) {
        ++runs;
        const at::Tensor between = at::exp(inputs[0] * weight);
        inner = c10::weak_intrusive_ptr<c10::TensorImpl>(between.getIntrusivePtr());
        return Tensors{between * weight};
      },
      {x});
  EXPECT_TRUE(inner.expired());
  made[0].sum().backward();
  EXPECT_EQ(runs, 2);
  EXPECT_TRUE(at::allclose(weight.grad(), at::full({3}, 2 * std::exp(1.0))));
  EXPECT_HAS(error_of([&] { made[0].sum().backward(); }), "through the graph a second time");
}

}  // namespace
}  // namespace tessera::nn

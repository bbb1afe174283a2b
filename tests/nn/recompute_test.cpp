// Activation checkpointing: gradients are those without it, and only inputs are kept.
#include "tessera/nn/recompute.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

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
  Tensors gradients(bool again, bool trained_inputs, const RecomputeOptions& options = {}) {
    torch::manual_seed(3);
    linear->zero_grad();
    const at::Tensor x = at::linspace(-1, 1, 12).view({3, 4}).requires_grad_(trained_inputs), y = at::full({3, 4}, 0.7);
    const Tensors inputs{x * at::rand({3, 4}), y, at::arange(3)};
    const Tensors made = again ? recompute(*this, inputs, options) : (*this)(inputs);
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

TEST(Recompute, InputsInSlicesGiveTheSame) {
  for (const int ranks : {1, 2, 3}) {
    testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
      const at::Tensor weight = at::linspace(0, 1, 4).requires_grad_(), x = at::linspace(-1, 1, 12).view({3, 4});
      const at::Tensor number = at::full({}, 2.0), whole = at::arange(5);
      const auto f = [&](const Tensors& in) { return Tensors{at::tanh(in[0] * in[3]) * in[1], in[2] * 2}; };
      for (const bool on_host : {false, true}) {
        Tensors gradients;
        for (const bool kept_whole : {true, false}) {
          weight.mutable_grad().reset();
          const at::Tensor leaf = x.clone().requires_grad_();
          const Tensors inputs{leaf * 1, number, whole, weight};
          RecomputeOptions options;
          if (!kept_whole) options = {on_host, group};
          const Tensors made = recompute(f, inputs, options);
          made[0].sum().backward();
          gradients.push_back(leaf.grad());
          gradients.push_back(weight.grad());
        }
        EXPECT_TRUE(at::equal(gradients[0], gradients[2]) && at::equal(gradients[1], gradients[3])) << ranks;
      }
    });
  }
}

// Of an input nothing is kept but a slice.
TEST(Recompute, SlicesTakeTheMemoryOfSlices) {
  testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
    const at::Tensor weight = at::ones({8}).requires_grad_();
    at::Tensor x = at::ones({8}) * 2;
    const c10::weak_intrusive_ptr<c10::TensorImpl> seen(x.getIntrusivePtr());
    const auto made = recompute([&](const Tensors& in) { return Tensors{in[0] * weight}; }, {x}, {false, group});
    x.reset();
    EXPECT_TRUE(seen.expired());
    made[0].sum().backward();
    EXPECT_TRUE(at::equal(weight.grad(), at::full({8}, 2.0)));
  });
}

TEST(Recompute, TheConfigurationSaysHow) {
  testing::run_axes({{comm::Axis::Tp, 2}}, [](int, const comm::Mesh& mesh) {
    const auto of = [&](const char* section) {
      return recompute_options(
          config::Config::from_json(std::string(R"({"activation_checkpointing": {)") + section + "}}"), mesh);
    };
    EXPECT_TRUE(!of("").on_host && of("").slices == nullptr);
    EXPECT_TRUE(of(R"("cpu_checkpointing": true)").on_host);
    EXPECT_EQ(of(R"("partition_activations": true)").slices, mesh.group(comm::Axis::Tp));
  });
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

// Activation checkpointing: gradients are those without it, and only inputs are kept.
#include "tessera/nn/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include "tessera/nn/engine.h"
#include "tessera/nn/hooked.h"
#include "tessera/parallel/tiles.h"
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

TEST(Recompute, AFunctionThatIsNullIsRefused) {
  EXPECT_HAS(error_of<c10::ValueError>([] { recompute(nullptr, {at::ones({2})}); }),
             "[recompute] the function is null");
}

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

// A block whose inputs alone are kept, a layer and a loss that run a tile at a time.
struct PartImpl : Hooked<PartImpl, at::Tensor(at::Tensor)> {
  PartImpl(int64_t in, int64_t out) : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward_impl(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Part);

struct LongNet : torch::nn::Module {
  explicit LongNet(bool saves) : saves(saves) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : parameters())
      param.uniform_(-0.4, 0.4, generator);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    const auto part = [this](const Tensors& in) { return Tensors{at::tanh(block(in[0])) * in[1] + in[0]}; };
    const Tensors inputs{first(x), at::full({}, 0.5)};
    const at::Tensor seen = saves ? recompute(part, inputs, {.on_host = true})[0] : part(inputs)[0];
    const at::Tensor mixed = seen + parallel::tiled_mlp([this](const at::Tensor& t) { return layer(t); }, seen, 3);
    return parallel::tiled_loss(
        [this](const at::Tensor& t, const at::Tensor& labels, const at::Tensor&) {
          return at::cross_entropy_loss(head(t).flatten(0, 1), labels.flatten());
        },
        mixed, y, 4);
  }
  const bool saves;
  Part first{register_module("first", Part(5, 8))}, block{register_module("block", Part(8, 8))},
      layer{register_module("layer", Part(8, 8))}, head{register_module("head", Part(8, 7))};
};

TEST(Recompute, UnderEnginesOfAllStagesWithTilesAsPlainTorchBitForBit) {
  const at::Tensor x = at::linspace(-1, 1, 2 * 9 * 5).sin().view({2, 9, 5}), y = at::arange(18).view({2, 9}) % 7;
  LongNet plain(false);
  for (int step = 0; step < 3; ++step) {
    plain.zero_grad();
    plain.forward(x, y).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : plain.parameters())
      param.sub_(param.grad(), 0.125);
  }
  for (const int ranks : {1, 2, 4})  // means of equal gradients are exact
    for (int stage = 0; stage < 4; ++stage)
      testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
        const auto net = std::make_shared<LongNet>(true);
        const auto config = Config::from_json(c10::str(
            R"({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "tessera": {"min_unit_elements": 1},
                "optimizer": {"type": "SGD", "params": {"lr": 0.125}},
                "zero_optimization": {"stage3_param_persistence_threshold": 0, "stage": )",
            stage, "}}"));
        auto engine = initialize(net, config, comm::Mesh(group));
        for (int step = 0; step < 3; ++step) {
          engine.forward(x, y).backward();
          EXPECT_TRUE(engine.step());
        }
        const GatheredParameters whole(engine, net->parameters());
        const auto got = net->named_parameters(), want = plain.named_parameters();
        for (const auto& item : want)
          EXPECT_TRUE(got[item.key()].equal(item.value())) << item.key() << ", stage " << stage << ", " << ranks;
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

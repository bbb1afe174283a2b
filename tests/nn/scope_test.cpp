// Partitioned parameters in C++: Hooked modules, parameters below none, regions.
#include "tessera/nn/scope.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include "tessera/nn/engine.h"
#include "tessera/nn/hooked.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

struct BlockImpl : Hooked<BlockImpl, at::Tensor(at::Tensor)> {
  BlockImpl() { linear = register_module("linear", torch::nn::Linear(6, 6)); }
  at::Tensor forward_impl(at::Tensor x) {
    if (fail) throw std::runtime_error("no luck");
    return x + torch::tanh(linear(x));
  }
  torch::nn::Linear linear{nullptr};
  bool fail = false;
};
TORCH_MODULE(Block);

struct Net : torch::nn::Module {
  Net() {
    blocks = register_module("blocks", torch::nn::Sequential(Block(), Block(), Block()));
    head = register_module("head", torch::nn::Linear(6, 2));
    // Of its own: ranks that are threads share the default generator.
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters())
      p.uniform_(-0.4, 0.4, generator);
  }
  at::Tensor forward(const at::Tensor& x) { return head(blocks->forward(x)).square().mean(); }
  torch::nn::Sequential blocks{nullptr};
  torch::nn::Linear head{nullptr};
};

Config config(int ranks) {
  return Config::from_json(R"({"gradient_clipping": 0, "train_micro_batch_size_per_gpu": 4, "train_batch_size": )" +
                           std::to_string(4 * ranks) + R"(, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "tessera": {"min_unit_elements": 1},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}})");
}

int gathered(engine::Engine& engine) {
  int count = 0;
  for (size_t i = 0; i < engine.params().size(); ++i)
    count += engine.regions().is_gathered(static_cast<int>(i)) ? 1 : 0;
  return count;
}

TEST(Scope, HookedBlocksAreGatheredOneAtATimeAndTrainAsPlainPyTorch) {
  const at::Tensor x = torch::randn({4, 6});
  Net plain;
  for (int step = 0; step < 3; ++step) {
    plain.zero_grad();
    plain.forward(x).backward();
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : plain.parameters())
      p.sub_(p.grad(), 0.1);
  }
  testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
    auto net = std::make_shared<Net>();
    auto engine = initialize(net, config(2), comm::Mesh(group));
    EXPECT_EQ(gathered(engine.core()), 0);
    group->reset_stats();
    for (int step = 0; step < 3; ++step) {
      engine.forward(x).backward();
      EXPECT_EQ(gathered(engine.core()), 0);
      EXPECT_TRUE(engine.step());
    }
    EXPECT_GE(group->stats().all_gather.calls, 3 * 4);
    GatheredParameters region(engine.core(), net->parameters());
    const auto mine = net->parameters(), expected = plain.parameters();
    for (size_t i = 0; i < mine.size(); ++i)
      EXPECT_TRUE(at::allclose(mine[i], expected[i], 1e-5, 1e-6)) << i;
    region.close();
    EXPECT_EQ(gathered(engine.core()), 0);
  });
}

TEST(Scope, AForwardThatThrowsLeavesNothingGathered) {
  testing::run_ranks(2, [](int, const comm::GroupPtr& group) {
    auto net = std::make_shared<Net>();
    auto engine = initialize(net, config(2), comm::Mesh(group));
    auto last = std::dynamic_pointer_cast<BlockImpl>(net->blocks->ptr(2));
    last->fail = true;
    EXPECT_THROW(engine.forward(torch::ones({4, 6})), std::runtime_error);
    EXPECT_EQ(gathered(engine.core()), 0);
    last->fail = false;
    engine.forward(torch::ones({4, 6})).backward();
    EXPECT_TRUE(engine.step());
  });
}

TEST(Scope, RegionsTakeTheWritersValues) {
  testing::run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    auto net = std::make_shared<Net>();
    auto engine = initialize(net, config(2), comm::Mesh(group));
    const at::Tensor weight = net->head->weight;
    {
      GatheredParameters region(engine.core(), {weight}, /*writer=*/1);
      const torch::NoGradGuard no_grad;
      at::Tensor(weight).fill_(rank);
    }
    EXPECT_THROW((void)weight.sum(), c10::Error);
    GatheredParameters region(engine.core(), {weight});
    EXPECT_TRUE(weight.equal(torch::ones({2, 6})));
    EXPECT_THROW(GatheredParameters(engine.core(), {weight}), c10::Error);
  });
}

TEST(Scope, HookedModulesWorkWithoutAnEngine) {
  Block block;
  EXPECT_EQ(block(torch::ones({2, 6})).size(0), 2);
  torch::nn::Sequential both(Block(), torch::nn::Linear(6, 1));
  EXPECT_EQ(both->forward(torch::ones({2, 6})).size(1), 1);
}

}  // namespace
}  // namespace tessera::nn

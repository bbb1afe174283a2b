// The backward API against plain autograd, in C++: what counts as a backward, and what the hooks leave alone.
#include "tessera/zero/hooks.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

namespace {

std::vector<at::Tensor> plain_grads(const std::function<at::Tensor(const Toy&)>& loss) {
  const Toy toy;
  loss(toy).backward();
  std::vector<at::Tensor> grads;
  for (const at::Tensor& t : toy.tensors)
    grads.push_back(t.grad().defined() ? t.grad() : at::zeros_like(t));
  return grads;
}

void expect_grads(Engine& engine, const std::vector<at::Tensor>& expected, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    at::Tensor grad = engine.states().get_full(i, Quantity::Gradient);
    if (!grad.defined()) grad = at::zeros_like(expected[i]);
    EXPECT_TRUE(at::allclose(grad, expected[i], 1e-5, 1e-7)) << what << ": " << Toy::kNames[i];
  }
}

// Every stage at one and two ranks; both ranks see the same data, so the mean is the plain gradient.
void every_stage(const std::function<void(Engine&, const Toy&, int stage)>& body) {
  over_stages({1, 2}, {.last_stage = 2}, [&](const ToyRank& on) { body(on.engine, on.toy, on.stage); });
}

const at::Tensor& data() {
  static const at::Tensor batch = toy_batch(0, 0);
  return batch;
}

}  // namespace

TEST(Hooks, GradientsLeavePGradExceptInStage0) {
  every_stage([](Engine& engine, const Toy& toy, int stage) {
    toy_forward(engine, toy, data()).backward();
    for (const at::Tensor& t : toy.tensors)
      EXPECT_EQ(t.grad().defined(), stage == 0);
  });
}

TEST(Hooks, NonScalarOutputWithAGradient) {
  const at::Tensor g = at::randn({4, 3});
  const auto expected = plain_grads([&](const Toy& toy) { return (toy.outputs(data()) * g).sum(); });
  every_stage([&](Engine& engine, const Toy& toy, int) {
    engine.pre_forward();
    const at::Tensor out = toy.outputs(data(), &engine);
    engine.post_forward({out});
    out.backward(g);
    expect_grads(engine, expected, "out.backward(g)");
  });
}

TEST(Hooks, ModuleCalledDirectlyAndLossTermsOutsideForward) {
  const auto loss = [](const Toy& toy) { return toy.loss(data()) + toy.tensors[3].square().sum(); };
  const auto expected = plain_grads(loss);
  every_stage([&](Engine& engine, const Toy& toy, int) {
    engine.regions().open({0, 1, 2, 3, 4});  // where parameters are partitioned
    loss(toy).backward();                    // the engine saw no forward at all
    engine.regions().close({0, 1, 2, 3, 4});
    expect_grads(engine, expected, "direct call");
  });
}

TEST(Hooks, SeveralBackwardsOfOneStepAddUp) {
  const auto expected =
      plain_grads([](const Toy& toy) { return toy.loss(data()) + 2 * toy.loss(toy_batch(1, 7)) + toy.loss(data()); });
  every_stage([&](Engine& engine, const Toy& toy, int) {
    const at::Tensor a = toy_forward(engine, toy, data());
    const at::Tensor b = 2 * toy_forward(engine, toy, toy_batch(1, 7));
    a.backward({}, /*retain_graph=*/true);
    b.backward();
    a.backward();
    expect_grads(engine, expected, "three backwards");
    EXPECT_TRUE(engine.step());
  });
}

// set_() makes torch forget the accumulator that the graph so far leads to.
TEST(Hooks, EveryAccumulatorOfAParameterIsFollowed) {
  const auto loss = [](const Toy& toy) {
    at::Tensor sum = at::zeros({});
    for (int use = 1; use <= 3; ++use) {
      for (at::Tensor t : toy.tensors) {
        sum = sum + (t * use).sum();
        const at::NoGradGuard no_grad;
        t.set_(t);
      }
    }
    return sum;
  };
  const auto expected = plain_grads(loss);
  every_stage([&](Engine& engine, const Toy& toy, int) {
    for (int backward = 1; backward <= 2; ++backward) {
      engine.pre_forward();
      const at::Tensor sum = loss(toy);
      engine.post_forward({sum});
      sum.backward();
      std::vector<at::Tensor> times;
      for (const at::Tensor& grad : expected)
        times.push_back(grad * backward);
      expect_grads(engine, times, "several accumulators");
    }
    EXPECT_TRUE(engine.step());
    EXPECT_TRUE(zero::Hooks::is_watched(toy.tensors[0]));
    engine.destroy();
    EXPECT_FALSE(zero::Hooks::is_watched(toy.tensors[0]));
  });
}

TEST(Hooks, AutogradGradHasNoSideEffect) {
  every_stage([](Engine& engine, const Toy& toy, int stage) {
    const at::Tensor x = data().clone().requires_grad_(true);
    const at::Tensor loss = toy_forward(engine, toy, x);
    const auto grads = torch::autograd::grad({loss}, {x, toy.tensors[3]}, {}, /*retain_graph=*/true);
    EXPECT_EQ(grads.size(), 2U);
    EXPECT_TRUE(engine.regions().is_gathered(0));
    EXPECT_EQ(engine.regions().is_gathered(3), stage < 3 || engine.mesh().size(comm::Axis::DpShard) == 1);
    EXPECT_FALSE(engine.states().get_full(3, Quantity::Gradient).defined());
    loss.backward();
    EXPECT_TRUE(at::allclose(engine.states().get_full(3, Quantity::Gradient), grads[1], 1e-5, 1e-7));
    EXPECT_TRUE(at::allclose(x.grad(), grads[0], 1e-5, 1e-7)) << "inputs' gradients are plain PyTorch's";
  });
}

namespace {

// A function that runs a backward inside its forward and hands the input's gradient on (tiled loss).
struct TiledLoss : torch::autograd::Function<TiledLoss> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& h, const at::Tensor& weight) {
    at::Tensor leaf = h.detach().requires_grad_(true);
    at::Tensor loss;
    {
      const at::AutoGradMode with_grad(true);
      loss = at::matmul(leaf, weight).square().mean();
      loss.backward();
    }
    ctx->save_for_backward({leaf.grad()});
    return loss.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    return {ctx->get_saved_variables()[0] * grads[0], at::Tensor()};
  }
};

// Re-entrant checkpointing: the backward runs a backward of its own.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const Toy* toy,
                            Engine* engine) {
    ctx->save_for_backward({x});
    ctx->saved_data["toy"] = reinterpret_cast<int64_t>(toy);
    ctx->saved_data["engine"] = reinterpret_cast<int64_t>(engine);
    const at::NoGradGuard no_grad;
    return toy->outputs(x, engine);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto* toy = reinterpret_cast<const Toy*>(ctx->saved_data["toy"].toInt());
    auto* engine = reinterpret_cast<Engine*>(ctx->saved_data["engine"].toInt());
    const at::AutoGradMode with_grad(true);
    at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_(true);
    toy->outputs(x, engine).backward(grads[0]);
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

TEST(Hooks, ABackwardInsideAForwardIsNotTheUsers) {
  const auto expected = plain_grads([](const Toy& toy) {
    const at::Tensor h = at::tanh(at::matmul(data() * toy.tensors[2], toy.tensors[3]));
    return at::matmul(h, toy.tensors[4]).square().mean();
  });
  over_stages({1, 2}, {.last_stage = 2}, [&](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    group->reset_stats();
    engine.pre_forward();
    const at::Tensor h = at::tanh(at::matmul(data() * toy.tensors[2], toy.tensors[3]));
    const at::Tensor loss = TiledLoss::apply(h, toy.tensors[4]);
    engine.post_forward({loss});
    const auto calls = group->stats().reduce_scatter.calls + group->stats().all_reduce.calls;
    EXPECT_EQ(calls, 0) << "the inner backward must not reduce";
    loss.backward();
    expect_grads(engine, expected, "tiled loss");
  });
}

TEST(Hooks, ReentrantCheckpointingReducesEveryUnitOnce) {
  const auto expected = plain_grads([](const Toy& toy) { return toy.outputs(data()).square().mean(); });
  over_stages({2}, {}, [&](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    group->reset_stats();
    for (int round = 0; round < 2; ++round) {
      engine.pre_forward();
      const at::Tensor x = data().clone().requires_grad_(true);
      const at::Tensor loss = Reentrant::apply(x, &toy, &engine).square().mean();
      engine.post_forward({loss});
      loss.backward();
      const auto& stats = group->stats();
      EXPECT_EQ(stage == 0 ? stats.all_reduce.calls - 1 : stats.reduce_scatter.calls, stage == 3 ? 4 : 3);
      expect_grads(engine, expected, "re-entrant");
      engine.zero_grad();
      group->reset_stats();
    }
  });
}

namespace {
struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("boom");
  }
};
}  // namespace

TEST(Hooks, AnExceptionInsideABackwardLeavesTheEngineUsable) {
  const auto expected = plain_grads([](const Toy& toy) { return toy.loss(data()); });
  every_stage([&](Engine& engine, const Toy& toy, int) {
    engine.pre_forward();
    const at::Tensor h = toy.module(&engine, 0, data(), [&] {
      return Throws::apply(at::tanh(at::matmul(data() * toy.tensors[2], toy.tensors[3])));
    });
    const at::Tensor loss = toy.module(&engine, 1, h, [&] { return at::matmul(h, toy.tensors[4]).square().mean(); });
    engine.post_forward({loss});
    EXPECT_THROW(loss.backward(), std::exception);
    engine.zero_grad();
    toy_forward(engine, toy, data()).backward();
    expect_grads(engine, expected, "after an exception");
    EXPECT_TRUE(engine.step());
  });
}

TEST(Hooks, ParametersUsedOnSomeRanksOnlyCountAsZeroElsewhere) {
  over_stages({3}, {.last_stage = 2}, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    for (int step = 0; step < 3; ++step) {
      // Rank r uses tensors r and 3 only; rank 2 in step 1 uses nothing of blocks.1.
      const at::Tensor loss = toy.tensors[rank].sum() + toy.tensors[3].sum();
      engine.pre_forward();
      engine.post_forward({loss});
      loss.backward();
      for (int i = 0; i < 5; ++i) {
        const at::Tensor grad = engine.states().get_full(i, Quantity::Gradient);
        const double expected = i < 3 ? 1.0 / 3 : 1.0;
        if (i == 4) {
          EXPECT_FALSE(grad.defined());
        } else if (stage > 0 || i == rank || i == 3) {
          EXPECT_TRUE(at::allclose(grad, at::full_like(grad, expected)));
        }
      }
      const at::Tensor untouched = toy.tensors[4].detach().clone();
      EXPECT_TRUE(engine.step());
      EXPECT_TRUE(untouched.equal(toy.tensors[4].detach())) << "no gradient anywhere: no weight decay either";
    }
    EXPECT_EQ(engine.states().param_step(0), 3);
    EXPECT_EQ(engine.states().param_step(4), 0);
  });
}

TEST(Hooks, ASecondLiveEngineOnTheSameParametersIsRefused) {
  const Toy toy;
  Engine first = toy_engine({}, toy, comm::single_group());
  EXPECT_THROW(toy_engine({}, toy, comm::single_group()), c10::ValueError);
  first.destroy();
  EXPECT_NO_THROW(toy_engine({}, toy, comm::single_group()));
}

TEST(Hooks, GraphsOutliveTheirEngine) {
  const Toy toy;
  at::Tensor loss;
  {
    Engine engine = toy_engine({}, toy, comm::single_group());
    loss = toy_forward(engine, toy, data());
  }
  loss.backward();
  EXPECT_TRUE(toy.tensors[3].grad().defined());
}

}  // namespace tessera::testing

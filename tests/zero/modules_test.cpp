// Partitioned parameters in whole steps: what is gathered after each moment, frozen and late gradients, regions, faults.
#include <gtest/gtest.h>

#include <torch/csrc/autograd/autograd.h>

#include "tests/support/errors.h"
#include "tests/support/partitioned.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

TEST(Modules, NothingIsGatheredBetweenTheUses) {
  on_ranks(2, [](Engine& engine, const Toy& toy, int rank) {
    EXPECT_EQ(gathered(engine), "");
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = toy_forward(engine, toy, toy_batch(rank, step));
      EXPECT_EQ(gathered(engine), "") << "modules called on their own have no order to foretell";
      loss.backward();
      EXPECT_EQ(gathered(engine), "");
      engine.step();
      EXPECT_EQ(gathered(engine), "");
    }
    toy_forward(engine, toy, toy_batch(rank, 9));  // dropped without a backward
    {
      const at::NoGradGuard no_grad;
      for (int i = 0; i < 3; ++i)
        toy_forward(engine, toy, toy_batch(rank, i));
    }
    EXPECT_EQ(gathered(engine), "");
  });
}

TEST(Modules, BucketsDoNotGrowOverSteps) {
  on_ranks(2, [](Engine& engine, const Toy& toy, int rank) {
    int64_t bytes = 0;
    for (int step = 0; step < 20; ++step) {
      toy_forward(engine, toy, toy_batch(rank, step)).backward();
      engine.step();
      if (step == 3) bytes = engine.memory().buckets;
    }
    EXPECT_EQ(engine.memory().buckets, bytes);
    EXPECT_EQ(engine.memory().params, 4 * (32 + 64 + 32));  // half of root, blocks.0 and blocks.1
  });
}

TEST(Modules, AnExceptionInTheForwardOrBackwardLeavesNothingGathered) {
  on_ranks(2, [](Engine& engine, const Toy& toy, int rank) {
    engine.pre_forward();
    EXPECT_THROW(toy.module(&engine, 0, toy_batch(rank, 0), []() -> at::Tensor { throw std::runtime_error("boom"); }),
                 std::runtime_error);
    engine.abort_forward();
    EXPECT_EQ(gathered(engine), "");
    const at::Tensor loss = toy_forward(engine, toy, toy_batch(rank, 0));
    loss.backward();
    EXPECT_THROW(loss.backward(), std::exception) << "the graph is gone";
    EXPECT_EQ(gathered(engine), "");
    engine.zero_grad();
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    EXPECT_TRUE(engine.step());
  });
}

TEST(Modules, FrozenParametersArePartitionedToo) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    ToyRun run;
    run.stage = 3;
    run.persistence = 0;
    run.clip = 0;
    const Toy toy;
    Toy plain;
    auto specs = toy.specs();
    for (const int i : {2, 3}) {
      specs[i].group = -1;
      at::Tensor(toy.tensors[i]).requires_grad_(false);
      plain.tensors[i].requires_grad_(false);
    }
    Engine engine(toy_options(run), comm::Mesh(group), specs, {toy_adamw()});
    EXPECT_EQ(gathered(engine), "");
    EXPECT_EQ(engine.memory().params, 4 * (32 + 64 + 32));
    EXPECT_EQ(engine.memory().states, 2 * 4 * (32 + 32)) << "none for frozen ones";
    for (int step = 0; step < 2; ++step) {
      toy_forward(engine, toy, toy_batch(0, 0)).backward();
      EXPECT_EQ(gathered(engine), "");
      if (step == 0) {
        plain.loss(toy_batch(0, 0)).backward();
        for (const int i : {0, 1, 4})
          EXPECT_TRUE(
              at::allclose(engine.states().get_full(i, Quantity::Gradient), plain.tensors[i].grad(), 1e-5, 1e-7));
      }
      EXPECT_TRUE(engine.step());
    }
    engine.regions().open({3});
    EXPECT_TRUE(toy.tensors[3].equal(plain.tensors[3]));
    engine.regions().close({3});
    (void)rank;
  });
}

// A second use of w2 outside of its module, whose gradient comes after the module's backward is over.
TEST(Modules, LateGradientsAreNotLost) {
  const at::Tensor x = toy_batch(0, 0);
  Toy plain;
  const auto late = [](const Toy& toy, const at::Tensor& leaf) { return (toy.tensors[4].sum() * leaf).sum(); };
  at::Tensor ones = at::ones({1});
  (plain.loss(x) + late(plain, ones)).backward();
  for (const bool only_rank_1 : {false, true}) {
    on_ranks(2, [&](Engine& engine, const Toy& toy, int rank) {
      engine.regions().open({4});
      const at::Tensor term = late(toy, ones);  // first in the forward: last in the backward
      at::Tensor loss = toy_forward(engine, toy, x);
      if (!only_rank_1 || rank == 1) loss = loss + term * (only_rank_1 ? 2.0 : 1.0);
      loss.backward();
      engine.regions().close({4});
      engine.grad_norm();  // agrees on late gradients
      for (const int i : kAll) {
        EXPECT_TRUE(at::allclose(engine.states().get_full(i, Quantity::Gradient), plain.tensors[i].grad(), 1e-5, 1e-6))
            << Toy::kNames[i];
      }
    });
  }
}

TEST(Modules, AParameterOfAnotherModuleIsGatheredWithItsUser) {
  Toy plain;
  const auto tied = [](const Toy& toy, Engine* engine) {
    const at::Tensor x = toy_batch(0, 0);
    const at::Tensor h =
        toy.module(engine, 0, x, [&] { return at::tanh(at::matmul(x * toy.tensors[2], toy.tensors[3])); });
    return toy
        .module(engine, 1, h,
                [&] {
                  if (engine != nullptr && !engine->regions().is_gathered(3)) engine->modules().use_elsewhere(3);
                  return at::matmul(h, toy.tensors[3].t()).sum() + at::matmul(h, toy.tensors[4]).sum();
                })
        .sum();
  };
  tied(plain, nullptr).backward();
  on_ranks(2, [&](Engine& engine, const Toy& toy, int) {
    for (int round = 0; round < 2; ++round) {
      engine.pre_forward();
      const at::Tensor loss = tied(toy, &engine);
      engine.post_forward({loss});
      loss.backward();
      EXPECT_EQ(gathered(engine), "");
      EXPECT_TRUE(at::allclose(engine.states().get_full(3, Quantity::Gradient), plain.tensors[3].grad(), 1e-4, 1e-5));
      engine.zero_grad();
    }
    EXPECT_NE(error_of([&] { engine.modules().use_elsewhere(3); }).find("no module"), std::string::npos);
  });
}

TEST(Modules, DestroyNamesTheReasonInWhatIsLeft) {
  on_ranks(2, [](Engine& engine, const Toy& toy, int) {
    engine.destroy();
    EXPECT_NE(error_of([&] { (void)toy.tensors[3].sum(); }).find("engine was destroyed"), std::string::npos);
  });
}

TEST(Modules, OneRankPartitionsNothing) {
  on_ranks(1, [](Engine& engine, const Toy& toy, int) {
    EXPECT_EQ(engine.modules().add({3}), -1);
    EXPECT_EQ(gathered(engine), "a b c w1 w2 ");
    EXPECT_NO_THROW((void)toy.tensors[3].sum().item<float>());
  });
}

}  // namespace tessera::testing

// Construction, p.grad of stage 0, no_sync and friends, memory, faults.
#include "tessera/zero/sharded_model.h"

#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

TEST(ShardedModel, BadParametersAreValueErrors) {
  const Toy toy;
  const auto build = [&](std::vector<engine::ParamSpec> specs) {
    Engine engine(toy_options({}), comm::Mesh(comm::single_group()), std::move(specs), {toy_adamw()});
  };
  auto twice = toy.specs();
  twice.push_back(twice[0]);
  EXPECT_THROW(build(twice), c10::ValueError);
  auto integers = toy.specs();
  integers[0].tensor = at::zeros({2}, at::kLong);
  EXPECT_THROW(build(integers), c10::ValueError);
  auto group = toy.specs();
  group[1].group = 3;
  EXPECT_THROW(build(group), c10::ValueError);
  auto not_leaf = toy.specs();
  not_leaf[0].tensor = toy.tensors[0] * 2;
  EXPECT_THROW(build(not_leaf), c10::ValueError);
}

TEST(ShardedModel, UnmanagedParametersGetRankZerosValueAndTheComputeDtype) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    const Toy toy;
    ToyRun run;
    run.bf16 = true;
    auto specs = toy.specs();
    specs[0].group = -1;
    specs[0].tensor = at::full({1}, 5.0 + rank);
    Engine engine(toy_options(run), comm::Mesh(group), specs, {toy_adamw()});
    EXPECT_EQ(specs[0].tensor.scalar_type(), at::kBFloat16);
    EXPECT_EQ(specs[0].tensor.item<float>(), 5.0F);
    EXPECT_THROW(engine.get_full(0, Quantity::Master), c10::ValueError);
  });
}

// Each buffer's bytes against the formula: (params + grads) whole or 1/N, states whole or 1/N.
TEST(ShardedModel, MemoryIsTheFormula) {
  for (const bool bf16 : {false, true}) {
    for (const int world : {1, 2, 4}) {
      for (int stage = 0; stage <= 2; ++stage) {
        run_ranks(world, [&](int, const comm::GroupPtr& group) {
          at::Tensor big = at::zeros({300, 1000}).requires_grad_(true);
          ToyRun run;
          run.stage = stage;
          run.bf16 = bf16;
          Engine engine(toy_options(run), comm::Mesh(group), {{"big", big, 0, ""}}, {toy_adamw()});
          const double y = 300 * 1000, width = bf16 ? 2 : 4;
          const double state_share = stage == 0 ? 1.0 : 1.0 / world;
          const double grad_share = stage == 2 ? 1.0 / world : 1.0;
          const auto memory = engine.memory();
          EXPECT_NEAR(memory.params, width * y, 0.01 * width * y);
          EXPECT_NEAR(memory.grads, width * y * grad_share, 0.01 * width * y);
          EXPECT_NEAR(memory.master, bf16 ? 2 * y * state_share : 0, 0.01 * 4 * y);
          EXPECT_NEAR(memory.states, 8 * y * state_share, 0.01 * 8 * y);
          big.sum().backward();
          const double bucket = stage == 2 && world > 1 ? width * y : 0;
          EXPECT_NEAR(engine.memory().buckets, bucket, 0.01 * width * y);
        });
      }
    }
  }
}

TEST(ShardedModel, Stage0HonoursGradientsTheUserSets) {
  const Toy toy;
  Engine engine = toy_engine({}, toy, comm::single_group());
  toy_forward(engine, toy, toy_batch(0, 0)).backward();
  toy.tensors[0].mutable_grad() = at::full({1}, 3.0);  // replaced
  toy.tensors[1].mutable_grad().mul_(0);               // edited in place
  toy.tensors[2].mutable_grad().reset();               // dropped
  const at::Tensor untouched = toy.tensors[2].detach().clone();
  EXPECT_EQ(engine.get_full(0, Quantity::Gradient).defined(), true);
  const double rest =
      toy.tensors[3].grad().square().sum().item<double>() + toy.tensors[4].grad().square().sum().item<double>();
  EXPECT_TRUE(engine.step());
  EXPECT_NEAR(*engine.global_grad_norm(), std::sqrt(9.0 + rest), 1e-5);
  EXPECT_TRUE(untouched.equal(toy.tensors[2].detach()));
  EXPECT_EQ(engine.param_step(2), 0);
}

TEST(ShardedModel, Stage0StepsOnGradientsSetWithoutABackward) {
  const Toy toy;
  ToyRun run;
  run.clip = 0;
  Engine engine = toy_engine(run, toy, comm::single_group());
  const at::Tensor before = toy.tensors[4].detach().clone();
  toy.tensors[4].mutable_grad() = at::ones({5, 3});
  EXPECT_TRUE(engine.step());
  EXPECT_FALSE(before.equal(toy.tensors[4].detach()));
  EXPECT_EQ(engine.param_step(4), 1);
  EXPECT_EQ(engine.param_step(0), 0);
}

TEST(ShardedModel, NoSyncAccumulatesLocallyAndTheNextBackwardReducesAll) {
  over_stages({2}, {.last_stage = 2}, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    group->reset_stats();
    engine.begin_no_sync();
    EXPECT_THROW(engine.begin_no_sync(), c10::Error);
    EXPECT_THROW(engine.step(), c10::Error);
    toy.tensors[1].sum().backward();
    const auto& stats = group->stats();
    EXPECT_EQ(stats.all_reduce.calls + stats.reduce_scatter.calls, 0);
    EXPECT_TRUE(engine.get_full(1, Quantity::Gradient).equal(at::ones({3}))) << "the local gradient";
    engine.end_no_sync();
    (toy.tensors[1].sum() * (rank == 0 ? 2 : 4)).backward();
    EXPECT_TRUE(at::allclose(engine.get_full(1, Quantity::Gradient), at::full({3}, 4.0))) << "1 + mean(2, 4)";
  });
}

TEST(ShardedModel, CoalesceIssuesOneReductionForAllBackwardsInside) {
  over_stages({2}, {.persistence = 0}, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    group->reset_stats();
    engine.begin_coalesce();
    EXPECT_THROW(engine.begin_no_sync(), c10::Error);
    for (int i = 0; i < 3; ++i)
      toy_forward(engine, toy, toy_batch(rank, i)).backward();
    engine.end_coalesce();
    const auto& stats = group->stats();
    const int agreement = stage == 0 ? 1 : 0;  // on late gradients, where the user sees the sums
    EXPECT_EQ(stats.all_reduce.calls + stats.reduce_scatter.calls, 3 + agreement) << "one for each unit";
    EXPECT_TRUE(engine.step());
  });
}

TEST(ShardedModel, AThrowingRankEndsTheOthersWithItsReason) {
  for (const char* where : {"forward", "backward", "step"}) {
    std::string survivor;
    try {
      run_ranks(3, [&](int rank, const comm::GroupPtr& group) {
        ToyRun run;
        run.stage = 2;
        const Toy toy;
        Engine engine = toy_engine(run, toy, group);
        const std::string moment = where;
        try {
          if (rank == 1 && moment == "forward") throw std::runtime_error("bad batch");
          const at::Tensor loss = toy_forward(engine, toy, toy_batch(rank, 0));
          if (rank == 1 && moment == "backward") throw std::runtime_error("bad batch");
          loss.backward();
          if (rank == 1 && moment == "step") throw std::runtime_error("bad batch");
          engine.step();
        } catch (const c10::DistBackendError& e) {
          if (rank == 0) survivor = e.what();
        }
      });
      FAIL() << where;
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "bad batch");
    }
    EXPECT_NE(survivor.find("rank 1"), std::string::npos) << survivor;
    EXPECT_NE(survivor.find("bad batch"), std::string::npos) << survivor;
  }
}

TEST(ShardedModel, DestroyIsFinalAndKeepsValues) {
  const Toy toy;
  Engine engine = toy_engine({}, toy, comm::single_group());
  const at::Tensor before = toy.tensors[3].detach().clone();
  engine.destroy();
  engine.destroy();
  EXPECT_TRUE(engine.destroyed());
  EXPECT_TRUE(before.equal(toy.tensors[3].detach()));
  EXPECT_THROW(engine.step(), c10::Error);
  EXPECT_THROW(engine.pre_forward(), c10::Error);
  EXPECT_THROW(engine.get_full(0, Quantity::Master), c10::Error);
}

}  // namespace tessera::testing

// p.grad of stage 0, no_sync and friends.
#include "tessera/zero/backward_driver.h"

#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

TEST(BackwardDriver, Stage0HonoursGradientsTheUserSets) {
  const Toy toy;
  Engine engine = toy_engine({}, toy, comm::single_group());
  toy_forward(engine, toy, toy_batch(0, 0)).backward();
  toy.tensors[0].mutable_grad() = at::full({1}, 3.0);  // replaced
  toy.tensors[1].mutable_grad().mul_(0);               // edited in place
  toy.tensors[2].mutable_grad().reset();               // dropped
  const at::Tensor untouched = toy.tensors[2].detach().clone();
  EXPECT_EQ(engine.states().get_full(0, Quantity::Gradient).defined(), true);
  const double rest =
      toy.tensors[3].grad().square().sum().item<double>() + toy.tensors[4].grad().square().sum().item<double>();
  EXPECT_TRUE(engine.step());
  EXPECT_NEAR(*engine.global_grad_norm(), std::sqrt(9.0 + rest), 1e-5);
  EXPECT_TRUE(untouched.equal(toy.tensors[2].detach()));
  EXPECT_EQ(engine.states().param_step(2), 0);
}

TEST(BackwardDriver, Stage0StepsOnGradientsSetWithoutABackward) {
  const Toy toy;
  ToyRun run;
  run.clip = 0;
  Engine engine = toy_engine(run, toy, comm::single_group());
  const at::Tensor before = toy.tensors[4].detach().clone();
  toy.tensors[4].mutable_grad() = at::ones({5, 3});
  EXPECT_TRUE(engine.step());
  EXPECT_FALSE(before.equal(toy.tensors[4].detach()));
  EXPECT_EQ(engine.states().param_step(4), 1);
  EXPECT_EQ(engine.states().param_step(0), 0);
}

TEST(BackwardDriver, NoSyncAccumulatesLocallyAndTheNextBackwardReducesAll) {
  over_stages({2}, {.last_stage = 2}, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    engine.begin_no_sync();
    EXPECT_THROW(engine.begin_no_sync(), c10::Error);
    EXPECT_THROW(engine.step(), c10::Error);  // for all ranks to hear
    group->reset_stats();
    toy.tensors[1].sum().backward();
    const auto& stats = group->stats();
    EXPECT_EQ(stats.all_reduce.calls + stats.reduce_scatter.calls, 0);
    EXPECT_TRUE(engine.states().get_full(1, Quantity::Gradient).equal(at::ones({3}))) << "the local gradient";
    engine.end_no_sync();
    (toy.tensors[1].sum() * (rank == 0 ? 2 : 4)).backward();
    EXPECT_TRUE(at::allclose(engine.states().get_full(1, Quantity::Gradient), at::full({3}, 4.0))) << "1 + mean(2, 4)";
  });
}

TEST(BackwardDriver, CoalesceIssuesOneReductionForAllBackwardsInside) {
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

}  // namespace tessera::testing

// Memory, faults, the end.
#include "tessera/zero/sharded_model.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

// Each buffer's bytes against the formula: params whole, states whole or 1/N; gradients, between their backward and the
// step, whole or 1/N.
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
          const auto memory = engine.memory();
          EXPECT_NEAR(memory.params, width * y, 0.01 * width * y);
          EXPECT_EQ(memory.grads, 0);
          EXPECT_NEAR(memory.master, bf16 ? 2 * y * state_share : 0, 0.01 * 4 * y);
          EXPECT_NEAR(memory.states, 8 * y * state_share, 0.01 * 8 * y);
          big.sum().backward();
          EXPECT_NEAR(engine.memory().grads, width * y * state_share, 0.01 * width * y);
          const double bucket = stage == 2 && world > 1 ? width * y : 0;
          EXPECT_NEAR(engine.memory().peak_buckets, bucket, 0.01 * width * y);
          EXPECT_EQ(engine.memory().buckets, 0);
          engine.step();
          EXPECT_EQ(engine.memory().grads, 0);
        });
      }
    }
  }
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

// One rank's backward fails amid its reductions and the engine goes, while the other is somewhere else: it must not wait for
// that one's calls.
TEST(ShardedModel, TheEndOfOneRanksEngineWaitsForNoOther) {
  for (const int stage : {1, 2}) {
    for (const bool destroys : {false, true}) {
      std::promise<void> gone;
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        const Toy toy;
        auto engine = std::make_unique<Engine>(toy_options({.stage = stage, .bucket = 1, .min_unit = 1}),
                                               comm::Mesh(group), toy.specs(), std::vector{toy_adamw()});
        const at::Tensor loss = toy_forward(*engine, toy, toy_batch(rank, 0));
        if (rank == 1) {  // it keeps its groups, and makes no call
          const auto done = gone.get_future();
          EXPECT_EQ(done.wait_for(std::chrono::seconds(10)), std::future_status::ready) << stage << destroys;
          return;
        }
        group->reset_stats();
        toy.tensors[2].register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("bad gradient"); });
        EXPECT_THROW(loss.backward(), std::runtime_error);
        const auto stats = group->stats();
        EXPECT_GT(stats.all_reduce.calls + stats.reduce_scatter.calls, 0) << stage;
        if (destroys) engine->destroy();
        engine.reset();
        gone.set_value();
      });
    }
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
  EXPECT_THROW(engine.states().get_full(0, Quantity::Master), c10::Error);
}

}  // namespace tessera::testing

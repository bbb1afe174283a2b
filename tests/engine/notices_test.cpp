#include "tessera/engine/notices.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/saved.h"

namespace tessera::testing {

TEST(Notices, MembersOfAListMayBeUsedInOtherSteps) {
  using Names = std::vector<std::string>;
  const Names names{"experts.0.up", "experts.1.up", "experts.1.gate", "fc1.weight", "fc2.weight", "layers.7.dead"};
  const std::vector<int> used{1, 0, 0, 1, 0, 0};
  EXPECT_EQ(engine::never_used(names, used, 1), (Names{"experts.1.gate", "fc2.weight", "layers.7.dead"}));
}

// Each once, on the first rank; nothing of what plain PyTorch trains as well.
TEST(Notices, AStepThatTrainsLessThanItSeemsSaysSoOnce) {
  for (const bool in_backward : {false, true}) {
    for (int stage = in_backward ? 1 : 0; stage <= 3; ++stage) {
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        const Toy toy;
        std::vector<engine::ParamSpec> specs = toy.specs();
        specs.push_back({"dead", at::ones({7}).requires_grad_(true), 0, "root"});
        const ToyRun run{.stage = stage, .clip = 0, .in_backward = in_backward};
        Engine engine(toy_options(run), comm::Mesh(group), specs, {toy_adamw()});
        EXPECT_HAS(message_of<UsageError>([&] { engine.step(); }), "no backward has reached this engine since");
        EXPECT_EQ(engine.global_steps() + engine.micro_steps(), 0);
        engine.count_empty_steps();
        engine.step();
        engine.step();
        train(engine, toy, rank, 0, 2);
        const std::vector<std::string> said = engine.take_notices();
        ASSERT_EQ(said.size(), rank == 0 ? 2U : 0U) << stage;
        if (rank == 0) {
          EXPECT_HAS(said[0], "no backward has reached this engine");
          EXPECT_HAS(said[1], "'dead': trained, and without a gradient in the first step");
        }
        train(engine, toy, rank, 2, 2);
        EXPECT_TRUE(engine.take_notices().empty());
      });
    }
  }
}

TEST(Notices, WhatSeveralStepsDidNotUseIsNamed) {
  using Names = std::vector<std::string>;
  const Names names{"layers.0.w",     "layers.1.w",     "experts.0.w", "experts.1.w",
                    "mlp.expert_0.w", "mlp.expert_1.w", "heads.a.w",   "heads.b.w"};
  EXPECT_EQ(engine::never_used(names, {10, 0, 4, 0, 9, 0, 10, 0}, 10), (Names{"layers.1.w", "heads.b.w"}));
  EXPECT_EQ(engine::never_used(names, {1, 0, 0, 1, 1, 0, 1, 0}, 1), (Names{"heads.b.w"}));
}

TEST(Notices, NothingIsSaidOfWhatIsRight) {
  over_stages({1, 2}, {.accumulation = 2, .clip = 0}, [](const ToyRank& on) {
    train(on.engine, on.toy, on.rank, 0, 4);
    on.engine.states().set_full(0, Quantity::Gradient, at::ones({1}));
    on.engine.set_gradient_accumulation_steps(1);
    on.engine.step();
    EXPECT_TRUE(on.engine.take_notices().empty());
  });
}

}  // namespace tessera::testing

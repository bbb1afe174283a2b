#include "tessera/zero/accumulation.h"

#include <gtest/gtest.h>

#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

// What one engine holds, put into another, is what it holds: before and after the reduction, with its flags.
TEST(Accumulation, ComesBack) {
  for (const bool held : {false, true}) {
    over_stages({1, 2, 3}, {.accumulation = 4, .persistence = 0}, [&](const ToyRank& on) {
      const auto& [engine, toy, rank, stage, group] = on;
      toy_forward(engine, toy, toy_batch(rank, 0)).backward();
      if (held) engine.begin_no_sync();
      toy_forward(engine, toy, toy_batch(rank, 1)).backward();
      if (held) engine.end_no_sync();
      const auto state = engine.accumulation().state();
      const auto kept = engine.accumulation().held();
      EXPECT_TRUE(engine.accumulation().begun());
      EXPECT_TRUE(stage >= 2 || kept.size() == 5) << "each parameter's own contributions";
      ToyRun run{.stage = stage, .accumulation = 4, .persistence = 0};
      const Toy other(3);
      Engine second = toy_engine(run, other, group);
      toy_forward(second, other, toy_batch(rank, 5)).backward();  // forgotten
      second.accumulation().begin(state);
      EXPECT_FALSE(second.accumulation().begun());
      for (const auto& gradient : kept)
        second.accumulation().put(gradient);
      second.accumulation().end(state);
      EXPECT_TRUE(second.accumulation().begun());
      const auto again = second.accumulation().held();
      ASSERT_EQ(again.size(), kept.size());
      for (size_t i = 0; i < kept.size(); ++i) {
        EXPECT_EQ(again[i].param, kept[i].param);
        EXPECT_EQ(again[i].reduced, kept[i].reduced);
        EXPECT_EQ(again[i].range, kept[i].range);
        EXPECT_TRUE(again[i].values.equal(kept[i].values)) << stage << held << i;
      }
      for (int id = 0; id < 5; ++id) {
        EXPECT_EQ(second.accumulation().state().counts[id].has_grad, state.counts[id].has_grad);
        EXPECT_TRUE(stage > 0 || other.tensors[id].grad().equal(toy.tensors[id].grad()));
      }
      EXPECT_EQ(second.grad_norm(), engine.grad_norm());
    });
  }
}

}  // namespace tessera::testing

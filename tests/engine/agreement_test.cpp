// Ranks that differ in what they step by are told on all of them, with nothing updated. Stages and front ends of Python are in
// tests/python/engine/test_ranks_differ.py.
#include "tessera/engine/agreement.h"

#include <gtest/gtest.h>

#include <mutex>

#include "tests/support/errors.h"
#include "tests/support/saved.h"

namespace tessera::testing {

using comm::Axis;

TEST(Agreement, RanksOfEveryAxisCompareRatesAtAStep) {
  for (const AxisSizes& sizes : std::vector<AxisSizes>{{{Axis::DpShard, 3}},
                                                       {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}},
                                                       {{Axis::DpReplicate, 3}, {Axis::DpShard, 1}},
                                                       {{Axis::DpShard, 2}, {Axis::Tp, 2}},
                                                       {{Axis::DpShard, 1}, {Axis::Tp, 2}}}) {
    for (const bool in_backward : {false, true}) {
      if (in_backward && sizes.contains(Axis::DpReplicate)) continue;  // excluded
      for (int stage = in_backward ? 1 : 0; stage <= 3; ++stage) {
        int world = 1;
        for (const auto& [axis, size] : sizes)
          world *= size;
        for (const int odd : {1, world - 1}) {
          std::mutex mutex;
          std::vector<std::string> texts;
          run_axes(sizes, [&](int rank, const comm::Mesh& mesh) {
            const Toy toy;
            const ToyRun run{.stage = stage, .clip = 0, .in_backward = in_backward};
            Engine engine(toy_options(run), mesh, toy.specs(), {toy_adamw(), toy_adamw()});
            const int batch = mesh.rank(comm::kBatchAxes);
            train(engine, toy, batch, 0, 1);
            if (rank == odd) engine.groups()[1].weight_decay = 0.25;
            toy_forward(engine, toy, toy_batch(batch, 1)).backward();
            const std::string text = error_of([&] { engine.step(); });
            EXPECT_EQ(engine.global_steps(), 1);
            EXPECT_EQ(engine.micro_steps(), 1);
            engine.groups()[1].weight_decay = 0.25;
            engine.step();
            EXPECT_EQ(engine.global_steps(), 2);
            const std::scoped_lock lock(mutex);
            texts.push_back(text);
          });
          for (const std::string& text : texts)
            EXPECT_HAS(text, c10::str("ranks do not step alike: rank 0 has weight_decay 0.1 in param group 1, rank ",
                                      odd, " has weight_decay 0.25"));
        }
      }
    }
  }
}

TEST(Agreement, ADigestTellsEveryFieldFromEveryOther) {
  std::vector<optim::GroupOptions> groups{toy_adamw(), toy_adamw()};
  const auto digest = [&](const char* call, int64_t steps, int64_t empty, const char* fault = "") {
    return engine::StepTerms{call, steps, empty, groups, fault}.digest();
  };
  const double same = digest("step()", 2, 0);
  EXPECT_EQ(digest("step()", 2, 0), same);
  for (const double other : {digest("grad_norm()", 2, 0), digest("step()", 3, 0), digest("step()", 2, 1),
                             digest("step()", 2, 0, "a: replaced")})
    EXPECT_NE(other, same);
  groups[1].lr = std::nextafter(groups[1].lr, 1.0);
  EXPECT_NE(digest("step()", 2, 0), same);
}

}  // namespace tessera::testing

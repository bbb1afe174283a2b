// Parity with plain single-process PyTorch over stage x precision x world size x accumulation, and where bits match.
#include "tessera/engine/engine.h"

#include <gtest/gtest.h>

#include <mutex>
#include <tuple>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

namespace {

// Values of all parameters after `steps` optimizer steps, as rank 0 sees them; ranks must agree bit for bit.
struct Outcome {
  std::vector<at::Tensor> masters, weights, grads;
  double norm = 0;
};

Outcome train(const ToyRun& run, int world, int steps, bool check_reference = false) {
  Outcome outcome;
  std::mutex mutex;
  run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
    // Ranks start apart: the engine must broadcast rank 0's values.
    const Toy toy(rank == 0 ? 1 : 99 + rank);
    Engine engine = toy_engine(run, toy, group);
    ToyReference reference(run.bf16 ? at::kBFloat16 : at::kFloat, world, run.accumulation, run.clip);
    // One micro-batch: the arithmetic is the reference's, but for the last bit of Adam's fp32 result. Several in bf16: every
    // addition rounds to 8 bits; a flipped last bit near zero can turn the sign of one element's Adam step, so masters
    // are compared as vectors.
    const bool rounds_often = run.bf16 && run.accumulation > 1;
    const double ulp = rounds_often ? std::ldexp(1.0, -7) : 1e-5;
    for (int step = 0; step < steps; ++step) {
      for (int micro = 0; micro < run.accumulation; ++micro) {
        toy_forward(engine, toy, toy_batch(rank, step * run.accumulation + micro)).backward();
        if (micro + 1 < run.accumulation) {
          EXPECT_FALSE(engine.step());
        }
      }
      std::vector<at::Tensor> grads;
      for (size_t i = 0; i < toy.tensors.size(); ++i)
        grads.push_back(engine.states().get_full(i, Quantity::Gradient));
      EXPECT_TRUE(engine.step());
      if (check_reference) {
        reference.step();
        for (size_t i = 0; i < grads.size(); ++i) {
          const at::Tensor gap = grads[i] - reference.grads[i];
          if (rounds_often) {  // later steps start from weights whose last bits differ
            EXPECT_LE(gap.norm().item<double>(), (step == 0 ? 1 : 4) * ulp * reference.grads[i].norm().item<double>())
                << "gradient of " << Toy::kNames[i] << " in step " << step;
          } else {
            EXPECT_LE(gap.abs().max().item<double>(), ulp * reference.grads[i].abs().max().item<double>())
                << "gradient of " << Toy::kNames[i] << " in step " << step;
          }
          const at::Tensor master = engine.states().get_full(i, Quantity::Master), expected = reference.masters()[i];
          const double apart = (master - expected).norm().item<double>() / expected.norm().item<double>();
          EXPECT_LE(apart, rounds_often ? ulp : 1e-6) << "master of " << Toy::kNames[i] << " in step " << step;
        }
        EXPECT_NEAR(*engine.global_grad_norm(), reference.norm, ulp * reference.norm);
      }
      if (step + 1 == steps) {
        std::vector<at::Tensor> masters, weights;
        engine.regions().open({0, 1, 2, 3, 4});
        for (size_t i = 0; i < toy.tensors.size(); ++i) {
          masters.push_back(engine.states().get_full(i, Quantity::Master));
          weights.push_back(toy.tensors[i].detach().clone());
        }
        engine.regions().close({0, 1, 2, 3, 4});
        const std::lock_guard lock(mutex);
        if (outcome.weights.empty()) {
          outcome = {masters, weights, grads, *engine.global_grad_norm()};
        }
        for (size_t i = 0; i < weights.size(); ++i) {
          EXPECT_TRUE(weights[i].equal(outcome.weights[i])) << "ranks disagree on " << Toy::kNames[i];
        }
      }
    }
  });
  return outcome;
}

void expect_same_bits(const Outcome& a, const Outcome& b, const std::string& what) {
  for (size_t i = 0; i < a.weights.size(); ++i) {
    EXPECT_TRUE(a.grads[i].equal(b.grads[i])) << what << ": gradient of " << Toy::kNames[i];
    EXPECT_TRUE(a.masters[i].equal(b.masters[i])) << what << ": master of " << Toy::kNames[i];
    EXPECT_TRUE(a.weights[i].equal(b.weights[i])) << what << ": weight of " << Toy::kNames[i];
  }
  EXPECT_EQ(a.norm, b.norm) << what;
}

}  // namespace

class Parity : public ::testing::TestWithParam<std::tuple<int, bool, int, int>> {};

TEST_P(Parity, GradientsAndWeightsArePlainPytorchs) {
  const auto [stage, bf16, world, accumulation] = GetParam();
  ToyRun run;
  run.stage = stage;
  run.bf16 = bf16;
  run.accumulation = accumulation;
  train(run, world, 4, /*check_reference=*/true);
}

INSTANTIATE_TEST_SUITE_P(Grid, Parity,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Bool(),
                                            ::testing::Values(1, 2, 3, 4), ::testing::Values(1, 3)));

// Sums run in rank order wherever they run, so stages share their bits (Note [Order of summation]). With accumulation,
// stage 2 adds ranks before micro-batches and stages 0 and 1 the other way round: only those two stay equal.
TEST(SameBits, StagesOfOneWorldSize) {
  for (const bool bf16 : {false, true}) {
    for (const int world : {1, 2, 3, 4}) {
      for (const int accumulation : {1, 3}) {
        ToyRun run;
        run.bf16 = bf16;
        run.accumulation = accumulation;
        const Outcome zero = train(run, world, 3);
        run.stage = 1;
        expect_same_bits(zero, train(run, world, 3), "stage 1, world " + std::to_string(world));
        run.stage = 2;
        const Outcome two = train(run, world, 3);
        if (accumulation == 1 || world == 1) expect_same_bits(zero, two, "stage 2, world " + std::to_string(world));
        run.stage = 3;
        run.persistence = 0;  // resident parameters are other units, and the norm adds up in another order
        expect_same_bits(two, train(run, world, 3), "stage 3, world " + std::to_string(world));
      }
    }
  }
}

class Cuts : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, Cuts, ::testing::Values(2, 3));

TEST_P(Cuts, AnyBucketSizeAndUnitMerging) {
  ToyRun run;
  run.stage = GetParam();
  const Outcome whole = train(run, 3, 3);
  for (const int64_t bucket : {1, 20, 64, 100}) {
    run.bucket = bucket;
    const Outcome cut = train(run, 3, 3);
    for (size_t i = 0; i < whole.weights.size(); ++i) {
      EXPECT_TRUE(whole.grads[i].equal(cut.grads[i])) << "bucket " << bucket;
    }
    // The norm adds slices of other shapes: equal to rounding in double, so weights are equal but for its last bit.
    EXPECT_NEAR(whole.norm, cut.norm, 1e-12);
  }
  run.bucket = 500'000'000;
  run.min_unit = 1 << 20;
  const Outcome merged = train(run, 3, 3);
  for (size_t i = 0; i < whole.weights.size(); ++i)
    EXPECT_TRUE(whole.grads[i].equal(merged.grads[i]));
}

TEST(OddSizes, MoreRanksThanElements) {
  ToyRun run;
  for (run.stage = 0; run.stage <= 3; ++run.stage)
    train(run, 8, 2, /*check_reference=*/true);
}

TEST(Engine, ClippingOffLeavesGradientsAlone) {
  ToyRun run;
  run.clip = 0;
  for (run.stage = 0; run.stage <= 3; ++run.stage)
    train(run, 2, 2, /*check_reference=*/true);
}

TEST(Engine, PhasesAreCountedWhereTheyHappen) {
  ToyRun run;
  for (run.stage = 0; run.stage <= 3; ++run.stage) {
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const Toy toy;
      Engine engine = toy_engine(run, toy, group);
      for (int step = 0; step < 3; ++step) {
        toy_forward(engine, toy, toy_batch(rank, step)).backward();
        engine.step();
      }
      const Phases& phases = engine.phases();
      for (const Phase phase : {Phase::Forward, Phase::Backward, Phase::Step})
        EXPECT_EQ(phases.total(phase).times, 3) << phase_name(phase);
      EXPECT_GT(phases.total(Phase::Reduce).times, 0);
      EXPECT_EQ(phases.total(Phase::Gather).times > 0, run.stage > 0);
      EXPECT_LE(phases.total(Phase::Reduce).time, phases.total(Phase::Backward).time + phases.total(Phase::Step).time);
    });
  }
}

}  // namespace tessera::testing

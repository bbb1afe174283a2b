// Units that are updated while the backward goes on, against the usual step.
#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"
#include "tests/support/training.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

namespace {

ToyRun in_backward(ToyRun run) {
  run.in_backward = true;
  return run;
}

}  // namespace

TEST(UpdateInBackward, GivesTheBitsOfTheUsualStep) {
  for (const amp::PrecisionPolicy& mode : all_modes())
    for (const int world : {1, 2, 3})
      for (int stage = 1; stage <= 3; ++stage)
        for (const int64_t min_unit : {0, 1000}) {
          const ToyRun run{.stage = stage, .clip = 0, .min_unit = min_unit, .precision = mode};
          expect_same(train_toy(in_backward(run), world), train_toy(run, world),
                      c10::str("mode ", mode.param, " ", int(mode.master), " ", mode.state, ", stage ", stage, ", ",
                               world, " ranks, units of ", min_unit));
        }
}

// A parameter without a gradient on any rank keeps its moments; one that some rank has is updated on all.
TEST(UpdateInBackward, LeavesParametersWithoutGradientsAlone) {
  ToyTraining skips;
  skips.loss = [](const Toy& toy, Engine& engine, const at::Tensor& x, int rank, int step) {
    if (step == 0 || (step == 1 && rank == 0)) return toy_forward(engine, toy, x);
    engine.pre_forward();
    const at::Tensor h = toy.module(&engine, 0, x, [&] { return at::matmul(x * toy.tensors[2], toy.tensors[3]); });
    const at::Tensor loss = h.square().mean();
    engine.post_forward({loss});
    return loss;
  };
  for (const int world : {1, 2})
    for (int stage = 1; stage <= 2; ++stage) {
      const ToyRun run{.stage = stage, .clip = 0};
      expect_same(train_toy(in_backward(run), world, skips), train_toy(run, world, skips), c10::str("stage ", stage));
    }
}

TEST(UpdateInBackward, KeepsNoGradients) {
  for (int stage = 1; stage <= 3; ++stage)
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const Toy toy;
      Engine engine = toy_engine({.stage = stage, .clip = 0, .in_backward = true}, toy, group);
      const at::Tensor before = engine.states().get_full(3, Quantity::Master);
      toy_forward(engine, toy, toy_batch(rank, 0)).backward();
      EXPECT_EQ(engine.memory().grads, 0);
      EXPECT_FALSE(engine.states().get_full(3, Quantity::Gradient).defined());
      EXPECT_FALSE(engine.states().get_full(3, Quantity::Master).equal(before));
      EXPECT_GT(engine.grad_norm(), 0);
      engine.step();
      EXPECT_EQ(engine.states().param_step(3), 1);
    });
}

TEST(UpdateInBackward, ClipsByUnit) {
  for (int stage = 1; stage <= 3; ++stage) {
    const auto states = [&](double clip, int world) {
      const auto batch = [](int, int number) { return toy_batch(0, number); };
      return train_toy({.stage = stage, .clip = 0, .in_backward = true, .unit_clip = clip}, world, {.batch = batch})
          .states;
    };
    const auto loose = states(1e9, 2), none = states(0, 2), two = states(1e-3, 2), three = states(1e-3, 3);
    for (size_t i = 0; i < loose.size(); ++i) {
      EXPECT_TRUE(loose[i].equal(none[i]));
      EXPECT_TRUE(at::allclose(two[i], three[i], 1e-6, 1e-9)) << "stage " << stage << ", state " << i;
    }
    EXPECT_LT(two[3 * 3 + 1].norm().item<double>(), 0.2 * none[3 * 3 + 1].norm().item<double>());
  }
}

TEST(UpdateInBackward, RefusesWhatItCannotDo) {
  const Toy toy;
  const auto refused = [&](ToyRun run, const std::string& text) {
    EXPECT_HAS(error_of([&] { toy_engine(run, toy, comm::single_group()); }), text);
  };
  refused({.stage = 1, .in_backward = true}, "gradient_clipping 1");
  refused({.stage = 0, .clip = 0, .in_backward = true}, "stage 0");
  refused({.stage = 1, .accumulation = 2, .clip = 0, .in_backward = true}, "gradient_accumulation_steps");
  refused({.stage = 2, .clip = 0, .fp16 = true, .scaler = amp::ScalerOptions::fixed(8), .in_backward = true}, "scale");

  Engine engine = toy_engine(in_backward({.stage = 2, .clip = 0}), toy, comm::single_group());
  EXPECT_HAS(error_of([&] { engine.begin_no_sync(); }), "every backward is a step");
  EXPECT_HAS(error_of([&] { engine.set_gradient_accumulation_steps(2); }), "every backward is a step");
  toy_forward(engine, toy, toy_batch(0, 0)).backward();
  EXPECT_HAS(error_of([&] { engine.zero_grad(); }), "call step()");
  EXPECT_HAS(error_of([&] { toy_forward(engine, toy, toy_batch(0, 1)).backward(); }), "call step() after each");
  engine.step();
  engine.zero_grad();
  toy_forward(engine, toy, toy_batch(0, 1)).backward();
  engine.step();
  EXPECT_EQ(engine.global_steps(), 2);
}

TEST(UpdateInBackward, SaysThatABackwardEndedAmidTheUpdates) {
  const Toy toy;
  Engine engine = toy_engine(in_backward({.stage = 2, .clip = 0}), toy, comm::single_group());
  const at::Tensor x = 1 * toy_batch(0, 0).requires_grad_(true);
  x.register_hook([](const at::Tensor& grad) -> at::Tensor {  // runs last
    TORCH_CHECK(false, "the client's hook failed");
    return grad;
  });
  const at::Tensor loss = toy_forward(engine, toy, x);
  EXPECT_ANY_THROW(loss.backward());
  EXPECT_HAS(error_of([&] { engine.step(); }), "updated a part of the model");
}

}  // namespace tessera::testing

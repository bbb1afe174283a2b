#include "tessera/zero/joining.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/host_home.h"
#include "tests/support/modes.h"
#include "tests/support/training.h"

namespace tessera::testing {

using engine::Engine;

namespace {

const std::vector<size_t> kLate{1, 3};  // "b", small, and "w1" of a block
const zero::HomeMaker kHostHomes = [](shard::Quantity, int64_t size, const at::TensorOptions& options) {
  return std::make_shared<HostHome>(size, options);
};

void freeze(std::vector<engine::ParamSpec>& specs) {
  for (const size_t i : kLate) {
    specs[i].tensor.set_requires_grad(false);
    specs[i].group = -1;
    specs[i].joins = 0;
  }
}

// The toy, of which kLate are frozen when the engine is built.
Engine half_frozen(const engine::Options& options, const Toy& toy, const comm::GroupPtr& group) {
  std::vector<engine::ParamSpec> specs = toy.specs();
  freeze(specs);
  return Engine(options, comm::Mesh(group), specs, {toy_adamw()});
}

void thaw(const Toy& toy) {
  for (const size_t i : kLate)
    at::Tensor(toy.tensors[i]).set_requires_grad(true);
}

// Thawed before the first forward, a parameter is one that was trained from the start: bit for bit, but where micro-batches
// are reduced one by one and what waits is not.
void expect_like_from_the_start(const engine::Options& options, int world, const std::string& what) {
  run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
    const Toy whole, late;
    Engine first(options, comm::Mesh(group), whole.specs(), {toy_adamw()});
    const ToyTrained expected = train_toy(first, whole, rank, {.steps = 3});
    first.destroy();
    Engine second = half_frozen(options, late, group);
    thaw(late);
    const std::vector<at::Tensor> states = train_toy(second, late, rank, {.steps = 3}).states;
    if (options.zero.stage < 2 || options.gradient_accumulation_steps == 1) {
      expect_same(states, expected.states, what);
    } else {
      for (size_t i = 0; i < states.size(); ++i)
        EXPECT_TRUE(at::allclose(states[i], expected.states[i], 1e-4, 1e-6)) << what << ", value " << i;
    }
    EXPECT_EQ(second.take_joined(), (std::vector<int>{1, 3}));
  });
}

}  // namespace

TEST(Joining, AmongReplicas) {
  run_axes({{comm::Axis::DpReplicate, 2}, {comm::Axis::DpShard, 2}}, [&](int rank, const comm::Mesh& mesh) {
    for (int stage = 1; stage <= 3; ++stage) {
      const auto trained = [&](bool late) {
        const Toy toy;
        std::vector<engine::ParamSpec> specs = toy.specs();
        if (late) freeze(specs);
        Engine engine(toy_options({.stage = stage, .clip = 0}), mesh, specs, {toy_adamw()});
        if (late) thaw(toy);
        return train_toy(engine, toy, rank, {.steps = 3}).states;
      };
      expect_same(trained(true), trained(false), c10::str("stage ", stage));
    }
  });
}

TEST(Joining, AsTrainedFromTheStartInEveryStageAndPrecision) {
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      int number = 0;
      for (const amp::PrecisionPolicy& precision : all_modes())
        expect_like_from_the_start(toy_options({.stage = stage, .clip = 0, .precision = precision}), world,
                                   c10::str("stage ", stage, " on ", world, " ranks, mode ", number++));
      expect_like_from_the_start(toy_options({.stage = stage, .accumulation = 2, .clip = 0, .persistence = 0}), world,
                                 c10::str("stage ", stage, ", accumulation"));
      if (stage == 0) continue;
      expect_like_from_the_start(toy_options({.stage = stage, .clip = 0, .share = world > 1}), world,
                                 c10::str("stage ", stage, ", shared"));
      expect_like_from_the_start(toy_options({.stage = stage, .clip = 0, .in_backward = true}), world,
                                 c10::str("stage ", stage, ", updated in the backward"));
      engine::Options away = toy_options({.stage = stage, .clip = 0});
      away.zero.home = kHostHomes;
      if (stage == 3) away.zero.weight_home = kHostHomes;
      expect_like_from_the_start(away, world, c10::str("stage ", stage, ", away"));
    }
  }
}

// What other ranks do not train is an error on all, with nothing updated; a second call of all goes on.
TEST(Joining, RanksThatDifferAreAnErrorOnAll) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const Toy toy;
      Engine engine = half_frozen(toy_options({.stage = stage, .clip = 0, .persistence = 100}), toy, group);
      if (rank == 1) thaw(toy);
      toy_forward(engine, toy, toy_batch(rank, 0)).backward();
      const char* text =
          "rank 0 has nothing, rank 1 has parameter 'b' of shape [3] trained from here on in param group 0";
      EXPECT_HAS(error_of([&] { engine.step(); }), text);
      EXPECT_HAS(error_of([&] { engine.join(); }), text);
      EXPECT_EQ(engine.global_steps(), 0);
      thaw(toy);
      engine.step();
      EXPECT_EQ(engine.global_steps(), 1);
      EXPECT_EQ(engine.take_joined().size(), 2U);
    });
  }
}

}  // namespace tessera::testing

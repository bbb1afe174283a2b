// Test support: trainings of the toy, and what they come to.
#pragma once

#include <gtest/gtest.h>

#include "tests/support/toy.h"

namespace tessera::testing {

// Of every trained parameter the master and its moments, whole. Collective.
inline std::vector<at::Tensor> all_states(engine::Engine& engine, int moments = 2) {
  using engine::Quantity;
  std::vector<at::Tensor> states;
  for (int i = 0; i < static_cast<int>(engine.params().size()); ++i) {
    if (engine.params()[i].group < 0) continue;
    states.push_back(engine.states().get_full(i, Quantity::Master));
    if (moments > 0) states.push_back(engine.states().get_full(i, Quantity::State0));
    if (moments > 1) states.push_back(engine.states().get_full(i, Quantity::State1));
  }
  return states;
}

inline void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected,
                        const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(got[i].equal(expected[i])) << what << ", value " << i;
}

struct ToyTraining {
  int steps = 4;
  std::function<at::Tensor(int rank, int number)> batch = toy_batch;
  // Of a batch; runs its forward.
  std::function<at::Tensor(const Toy&, engine::Engine&, const at::Tensor& batch, int rank, int number)> loss =
      [](const Toy& toy, engine::Engine& engine, const at::Tensor& x, int, int) { return toy_forward(engine, toy, x); };
  std::function<void()> between = [] {};  // after a forward, a backward, a step
  int moments = 2;                        // of the optimizer's rule
};

struct ToyTrained {
  std::vector<at::Tensor> states;
  std::vector<double> numbers;  // loss and norm of every micro-batch
};

inline void expect_same(const ToyTrained& got, const ToyTrained& expected, const std::string& what) {
  expect_same(got.states, expected.states, what);
  EXPECT_EQ(got.numbers, expected.numbers) << what;
}

// Trains on one rank, with the micro-batches of an update. Collective.
inline ToyTrained train_toy(engine::Engine& engine, const Toy& toy, int rank, const ToyTraining& how = {}) {
  ToyTrained trained;
  const int micro_steps = static_cast<int>(engine.options().gradient_accumulation_steps);
  for (int number = 0; number < how.steps * micro_steps; ++number) {
    const at::Tensor loss = how.loss(toy, engine, how.batch(rank, number), rank, number);
    how.between();
    loss.backward();
    how.between();
    engine.step();
    how.between();
    const auto norm = engine.global_grad_norm();
    EXPECT_TRUE(norm || (number + 1) % micro_steps != 0);
    trained.numbers.insert(trained.numbers.end(), {loss.item<double>(), norm.value_or(-1)});
  }
  trained.states = all_states(engine, how.moments);
  return trained;
}

// The same from the start on all ranks of a world: what rank 0 has.
inline ToyTrained train_toy(const ToyRun& run, int world, const ToyTraining& how = {}) {
  ToyTrained trained;
  run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy;
    engine::Engine engine = toy_engine(run, toy, group);
    ToyTrained mine = train_toy(engine, toy, rank, how);
    if (rank == 0) trained = std::move(mine);
  });
  return trained;
}

}  // namespace tessera::testing

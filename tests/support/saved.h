// Test support: what an engine holds, and toys that were trained and saved.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/engine/checkpoint.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

struct Values {
  std::vector<at::Tensor> masters, first, second;
  std::vector<int64_t> steps;
};

inline Values values_of(Engine& engine) {
  Values v;
  for (int i = 0; i < static_cast<int>(engine.params().size()); ++i) {
    v.masters.push_back(engine.states().get_full(i, Quantity::Master));
    v.first.push_back(engine.states().get_full(i, Quantity::State0));
    v.second.push_back(engine.states().get_full(i, Quantity::State1));
    v.steps.push_back(engine.states().param_step(i));
  }
  return v;
}

inline void train(Engine& engine, const Toy& toy, int rank, int from, int steps) {
  for (int micro = from; micro < from + steps; ++micro) {
    engine.scaling().scale(toy_forward(engine, toy, toy_batch(rank, micro))).backward();
    engine.step();
  }
}

inline void expect_same(const std::vector<at::Tensor>& is, const std::vector<at::Tensor>& was, at::ScalarType through,
                        const std::string& what) {
  for (size_t i = 0; i < was.size(); ++i)
    EXPECT_TRUE(is[i].equal(was[i].to(through).to(at::kFloat))) << what << " " << i;
}

}  // namespace tessera::testing

// Test support: engines whose parameters are all partitioned.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

inline const std::vector<int> kAll{0, 1, 2, 3, 4};

inline void on_ranks(int world, const std::function<void(engine::Engine&, const Toy&, int rank)>& body,
                     bool bf16 = false) {
  run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
    ToyRun run;
    run.stage = 3;
    run.bf16 = bf16;
    run.persistence = 0;
    const Toy toy;
    engine::Engine engine = toy_engine(run, toy, group);
    body(engine, toy, rank);
  });
}

inline std::string gathered(engine::Engine& engine) {
  std::string text;
  for (const int i : kAll)
    text += engine.regions().is_gathered(i) ? Toy::kNames[i] + " " : "";
  return text;
}

}  // namespace tessera::testing

#include "tessera/zero/moving.h"

#include <gtest/gtest.h>

#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/host_home.h"
#include "tests/support/modes.h"
#include "tests/support/open_files.h"
#include "tests/support/training.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;
using zero::StateKind;

namespace {

const std::vector<StateKind> kEverything{StateKind::OptimizerStates, StateKind::Masters, StateKind::Weights,
                                         StateKind::Gradients, StateKind::Buckets};

engine::Options options_for(const ToyRun& run, const io::TempFolder& folder) {
  auto options = toy_options(run);
  options.nvme_path = folder.path();
  return options;
}

}  // namespace

TEST(Moving, ARoundTripChangesNoBit) {
  const io::TempFolder folder;
  for (const auto& precision : all_modes()) {
    for (int stage = 1; stage <= 3; ++stage) {
      for (const int world : {1, 2}) {
        run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
          const auto options = options_for({.stage = stage, .accumulation = 2, .precision = precision}, folder);
          const Toy toy, still;
          Engine engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()});
          Engine quiet(options, comm::Mesh(group), still.specs(), {toy_adamw()});
          const auto around = [&] {
            engine.offload_states(kEverything, shard::Residence::Nvme);
            engine.offload_states(kEverything, shard::Residence::Nvme);  // they are away
            const auto memory = engine.memory();
            EXPECT_EQ(memory.disk, memory.params + memory.grads + memory.master + memory.states);
            EXPECT_EQ(memory.buckets, 0);
            engine.reload_states();
            engine.reload_states();
            EXPECT_EQ(engine.memory().disk, 0);
          };
          expect_same(train_toy(engine, toy, rank, {.steps = 2, .between = around}),
                      train_toy(quiet, still, rank, {.steps = 2}), c10::str("stage ", stage, ", world ", world));
          EXPECT_TRUE(files_in(folder.path()).empty()) << "only what is away needs one";
        });
      }
    }
  }
}

// Another engine trains meanwhile; every call that needs what is away says what to call.
TEST(Moving, WhatIsAwayCannotBeUsed) {
  const io::TempFolder folder;
  for (const int stage : {1, 3}) {
    const Toy toy, other;
    Engine engine(options_for({.stage = stage}, folder), comm::Mesh(), toy.specs(), {toy_adamw()});
    Engine next(options_for({.stage = stage}, folder), comm::Mesh(), other.specs(), {toy_adamw()});
    const at::Tensor loss = toy_forward(engine, toy, toy_batch(0, 0));
    engine.offload_states(kEverything, shard::Residence::Nvme);
    EXPECT_TRUE(engine.states_are_away());
    toy_forward(next, other, toy_batch(0, 0)).backward();
    next.step();
    const std::vector<std::function<void()>> calls{[&] { toy_forward(engine, toy, toy_batch(0, 0)); },
                                                   [&] { loss.backward({}, /*retain_graph=*/true); },
                                                   [&] { engine.begin_backward(loss); },
                                                   [&] { engine.step(); },
                                                   [&] { engine.zero_grad(); },
                                                   [&] { engine.states().get_full(0, Quantity::Master); },
                                                   [&] { engine.checkpoints(); },
                                                   [&] { (void)toy.tensors[3].sum(); }};
    for (size_t i = 0; i < calls.size(); ++i)
      EXPECT_HAS(error_of(calls[i]), "reload_states()") << "stage " << stage << ", call " << i;
    engine.reload_states();
    toy_forward(engine, toy, toy_batch(0, 0)).backward();
    engine.step();
    for (size_t i = 0; i < toy.tensors.size(); ++i)
      EXPECT_TRUE(engine.states()
                      .get_full(static_cast<int>(i), Quantity::Master)
                      .equal(next.states().get_full(static_cast<int>(i), Quantity::Master)));
    engine.offload_states(kEverything, shard::Residence::Nvme);
    engine.destroy();
    EXPECT_TRUE(toy.tensors[3].isfinite().all().item<bool>()) << "parameters keep their values";
  }
}

TEST(Moving, OnlyWhatIsAskedFor) {
  const io::TempFolder folder;
  const auto bytes = [](const Engine::Memory& memory, StateKind kind) {
    switch (kind) {
      case StateKind::OptimizerStates:
        return memory.states;
      case StateKind::Masters:
        return memory.master;
      case StateKind::Weights:
        return memory.params;
      case StateKind::Gradients:
        return memory.grads;
      default:
        return int64_t{0};
    }
  };
  const Toy toy;
  Engine engine(options_for({.stage = 2, .bf16 = true, .accumulation = 2}, folder), comm::Mesh(), toy.specs(),
                {toy_adamw()});
  toy_forward(engine, toy, toy_batch(0, 0)).backward();
  for (const StateKind kind : kEverything) {
    engine.offload_states({kind}, shard::Residence::Nvme);
    EXPECT_EQ(engine.memory().disk, bytes(engine.memory(), kind));
    EXPECT_EQ(engine.states_are_away(), kind != StateKind::Buckets);
    engine.reload_states();
  }
  // Of a model on the CPU host memory is where it is.
  engine.offload_states(kEverything, shard::Residence::Host);
  EXPECT_FALSE(engine.states_are_away());
  EXPECT_EQ(engine.memory().host, 0);
}

TEST(Moving, RefusesByName) {
  const io::TempFolder folder;
  const auto error = [&](const ToyRun& run, const std::function<void(engine::Options&)>& change) {
    const Toy toy;
    auto options = options_for(run, folder);
    change(options);
    Engine engine(options, comm::Mesh(), toy.specs(), {toy_adamw()});
    return error_of([&] { engine.offload_states(kEverything, shard::Residence::Nvme); });
  };
  EXPECT_HAS(error({.stage = 0}, [](auto&) {}), "stage 1, 2 or 3");
  EXPECT_HAS(error({.stage = 1}, [](auto& o) { o.rule = optim::Rule::External; }), "Adam, AdamW, SGD");
  EXPECT_HAS(error({.stage = 1}, [](auto& o) { o.nvme_path = ""; }), "nvme_path");
  EXPECT_HAS(error({.stage = 3},
                   [](auto& o) {
                     o.zero.weight_home = [](Quantity, int64_t size, const at::TensorOptions& of) {
                       return std::make_shared<HostHome>(size, of);
                     };
                   }),
             "offload_param");
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy;
    Engine engine(options_for({.stage = 2}, folder), comm::Mesh(group), toy.specs(), {toy_adamw()});
    engine.begin_no_sync();
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    engine.end_no_sync();
    EXPECT_HAS(error_of([&] { engine.offload_states(kEverything, shard::Residence::Nvme); }), "no_sync");
    EXPECT_FALSE(engine.states_are_away());
  });
  const Toy toy;
  Engine engine(options_for({.stage = 3}, folder), comm::Mesh(), toy.specs(), {toy_adamw()});
  engine.regions().open({3});
  const auto call = [&] { engine.offload_states(kEverything, shard::Residence::Nvme); };
  EXPECT_HAS(error_of(call), "'w1' is in use (inside GatheredParameters)");
  engine.regions().close({3});
  EXPECT_EQ(error_of(call), "");
  engine.reload_states();
}

}  // namespace tessera::testing

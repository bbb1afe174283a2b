// What a step does to masters, compute parameters and counters beyond parity.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "tessera/offload/states.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/host_home.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

TEST(Updater, NonFiniteGradientsSkipTheStepOnEveryRank) {
  over_stages({2}, {.bf16 = true}, [](const ToyRank& on) {
    const auto& [engine, toy, rank, stage, group] = on;
    const at::Tensor before = engine.states().get_full(3, Quantity::Master);
    const double factor = rank == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
    (toy_forward(engine, toy, toy_batch(rank, 0)) * factor).backward();
    EXPECT_FALSE(engine.step());
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_EQ(engine.skipped_steps(), 1);
    EXPECT_EQ(engine.global_steps(), 1);
    EXPECT_TRUE(before.equal(engine.states().get_full(3, Quantity::Master)));
    EXPECT_FALSE(engine.global_grad_norm());
    toy_forward(engine, toy, toy_batch(rank, 0)).backward();
    EXPECT_TRUE(engine.step());
    EXPECT_EQ(engine.states().param_step(0), 1) << "a skipped step is no update";
  });
}

TEST(Updater, Fp32TakesNanGradientsAsPlainPytorchDoes) {
  const Toy toy;
  Engine engine = toy_engine({}, toy, comm::single_group());
  (toy_forward(engine, toy, toy_batch(0, 0)) * std::numeric_limits<double>::quiet_NaN()).backward();
  EXPECT_TRUE(engine.step());
  EXPECT_TRUE(at::isnan(toy.tensors[0].detach()).all().item<bool>());
}

// A norm of several engines: clips as the engine's own does, skips in every precision, and is one for all ranks.
TEST(Updater, AGivenNormStandsForTheEnginesOwn) {
  for (const bool bf16 : {false, true}) {
    const ToyRun run{.bf16 = bf16, .clip = 0.01};
    over_stages({1, 2}, run, [&run](const ToyRank& on) {
      const auto backward = [&](Engine& engine, const Toy& toy) {
        toy_forward(engine, toy, toy_batch(on.rank, 0)).backward();
      };
      ToyRun same = run;
      same.stage = on.stage;
      const Toy toy;
      Engine by_itself = toy_engine(same, toy, on.group->sibling());
      backward(by_itself, toy);
      EXPECT_TRUE(by_itself.step());

      const at::Tensor before = on.engine.states().get_full(3, Quantity::Master);
      backward(on.engine, on.toy);
      EXPECT_HAS(error_of([&] { on.engine.step({}, -1.0); }), "must not be negative");
      if (on.group->size() > 1) {
        EXPECT_HAS(error_of([&] { on.engine.step({}, 1.0 + on.rank); }), "different norms");
      }
      EXPECT_EQ(on.engine.micro_steps(), 0);
      EXPECT_FALSE(on.engine.step({}, std::numeric_limits<double>::infinity()));
      EXPECT_EQ(on.engine.skipped_steps(), 1);
      EXPECT_TRUE(before.equal(on.engine.states().get_full(3, Quantity::Master)));
      backward(on.engine, on.toy);
      EXPECT_TRUE(on.engine.step({}, *by_itself.global_grad_norm()));
      EXPECT_EQ(on.engine.global_grad_norm(), by_itself.global_grad_norm());
      for (int i = 0; i < 5; ++i)
        EXPECT_TRUE(
            on.engine.states().get_full(i, Quantity::Master).equal(by_itself.states().get_full(i, Quantity::Master)))
            << on.stage << " " << i;
    });
  }
}

TEST(Updater, LearningRatesOfGroupsApplyFromTheNextStep) {
  Toy toy;
  auto specs = toy.specs();
  specs[1].group = specs[3].group = 1;
  auto frozen_rate = toy_adamw();
  frozen_rate.lr = 0;
  Engine engine(toy_options({}), comm::Mesh(comm::single_group()), specs, {toy_adamw(), frozen_rate});
  const at::Tensor before = toy.tensors[3].detach().clone();
  const auto step = [&] {
    toy_forward(engine, toy, toy_batch(0, 0)).backward();
    engine.step();
  };
  step();
  EXPECT_TRUE(before.equal(toy.tensors[3].detach()));
  engine.groups()[1].lr = 0.1;
  step();
  EXPECT_FALSE(before.equal(toy.tensors[3].detach()));
}

TEST(Updater, AGraphKeptOverAStepCannotBeUsedAgainSilently) {
  const Toy toy;
  Engine engine = toy_engine({}, toy, comm::single_group());
  const at::Tensor loss = toy_forward(engine, toy, toy_batch(0, 0));
  loss.backward({}, /*retain_graph=*/true);
  engine.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

// A client's optimizer that knows only tensors: plain gradient descent on the master slices.
TEST(Updater, ExternalOptimizersUpdateTheMasterShards) {
  for (const bool bf16 : {false, true}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        ToyRun run;
        run.stage = stage;
        run.bf16 = bf16;
        run.clip = 0;
        auto options = toy_options(run);
        options.rule = optim::Rule::External;
        const Toy toy;
        Engine engine(options, comm::Mesh(group), toy.specs(), {optim::GroupOptions{}});
        toy_forward(engine, toy, toy_batch(rank, 0)).backward();
        std::vector<at::Tensor> expected;
        for (int i = 0; i < 5; ++i) {
          expected.push_back(engine.states().get_full(i, Quantity::Master) -
                             0.5 * engine.states().get_full(i, Quantity::Gradient));
        }
        EXPECT_THROW(engine.step(), c10::ValueError) << "step() needs the client's update; gradients stay";
        engine.step([&] {
          for (int i = 0; i < 5; ++i) {
            const at::Tensor grad = engine.states().local_view(i, Quantity::Gradient);
            engine.states().local_view(i, Quantity::Master).sub_(grad * 0.5);
            EXPECT_EQ(grad.scalar_type(), at::kFloat);
          }
        });
        engine.regions().open({0, 1, 2, 3, 4});
        for (int i = 0; i < 5; ++i) {
          EXPECT_TRUE(at::allclose(expected[i], engine.states().get_full(i, Quantity::Master), 1e-6, 1e-7));
          EXPECT_TRUE(
              toy.tensors[i]
                  .detach()
                  .to(at::kFloat)
                  .equal(
                      engine.states().get_full(i, Quantity::Master).to(toy.tensors[i].scalar_type()).to(at::kFloat)));
        }
        engine.regions().close({0, 1, 2, 3, 4});
      });
    }
  }
}

namespace {

// Where states and weights live: zero::Options::home and weight_home.
struct Homes {
  zero::HomeMaker states{}, weights{};
};

// What five parameters' states are after some steps, and after they were written.
std::vector<at::Tensor> states_after(const Homes& homes, const ToyRun& run, optim::Rule rule,
                                     const comm::GroupPtr& group) {
  const Toy toy;
  auto options = toy_options(run);
  options.rule = rule;
  options.zero.home = homes.states;
  options.zero.weight_home = homes.weights;
  optim::GroupOptions params = toy_adamw();
  params.momentum = 0.9;
  params.initial_accumulator_value = 0.3;
  Engine engine(options, comm::Mesh(group), toy.specs(), {params});
  for (int step = 0; step < 3; ++step) {
    for (int backward = 0; backward < 2; ++backward)
      toy_forward(engine, toy, toy_batch(group->rank(), 2 * step + backward)).backward();
    engine.step();
  }
  std::vector<Quantity> kinds{Quantity::Master, Quantity::State0};
  if (rule == optim::Rule::Adam) kinds.push_back(Quantity::State1);
  auto& states = engine.states();
  states.set_full(3, Quantity::State0, states.get_full(3, Quantity::State0) * 2);
  states.set_full(4, Quantity::Master, states.get_full(4, Quantity::Master) + 1);
  states.set_local(2, Quantity::State0, states.local_view(2, Quantity::State0) * 3);
  engine.refresh_params();
  engine.regions().open({0, 1, 2, 3, 4});
  std::vector<at::Tensor> values;
  for (int i = 0; i < 5; ++i) {
    values.push_back(toy.tensors[i].detach().clone());
    for (const Quantity what : kinds)
      values.push_back(states.get_full(i, what));
  }
  engine.regions().close({0, 1, 2, 3, 4});
  return values;
}

}  // namespace

// Masters, states and (stage 3) weights that live elsewhere: the same bits in every mode, stage and world, by every rule, also
// where they are read and written.
TEST(Updater, StatesAndWeightsMayLiveElsewhere) {
  const io::TempFolder folder;
  const auto in_memory = [](shard::Quantity, int64_t size, const at::TensorOptions& of) {
    return std::make_shared<HostHome>(size, of);
  };
  const auto on_disk = [&] {
    return offload::state_homes({.residence = shard::Residence::Nvme, .folder = folder.path()});
  };
  const auto modes = all_modes();
  for (size_t m = 0; m < modes.size() + 3; ++m) {
    using enum optim::Rule;
    const optim::Rule rule = m < modes.size() ? Adam : std::array{Sgd, Lion, Adagrad}[m - modes.size()];
    for (int stage = 0; stage <= 3; ++stage) {
      for (const int world : {1, 2, 3}) {
        if (stage < 3 && world == 3) continue;
        run_ranks(world, [&](int, const comm::GroupPtr& group) {
          const ToyRun run{.stage = stage, .precision = modes[m % modes.size()]};
          const auto here = states_after({}, run, rule, group);
          std::vector<Homes> homes{{in_memory}, {on_disk()}};
          if (stage == 3) homes = {{in_memory, in_memory}, {on_disk()}, {on_disk(), on_disk()}, {{}, on_disk()}};
          for (size_t h = 0; h < homes.size(); ++h) {
            const auto there = states_after(homes[h], run, rule, group);
            for (size_t i = 0; i < here.size(); ++i)
              EXPECT_TRUE(here[i].equal(there[i]))
                  << "mode " << m << ", stage " << stage << ", world " << world << ", homes " << h << ", " << i;
          }
        });
      }
    }
  }
}

TEST(Updater, TheNextChunkIsOnItsWayWhileOneIsUpdated) {
  HostHome::Log log;
  std::vector<engine::ParamSpec> specs{{"a", at::zeros({6 << 20}).requires_grad_(true), 0, "u"},
                                       {"b", at::zeros({64}).requires_grad_(true), 0, "v"}};
  auto options = toy_options({});
  options.zero.home = [&](shard::Quantity what, int64_t size, const at::TensorOptions& of) {
    return what == Quantity::State0 ? std::make_shared<HostHome>(size, of, size == 64 ? "b" : "a", &log) : nullptr;
  };
  Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
  (specs[0].tensor.sum() + specs[1].tensor.sum()).backward();
  engine.step();
  EXPECT_EQ(log, (HostHome::Log{"fetch a0", "fetch a4194304", "wait a0", "store a0", "fetch b0", "wait a4194304",
                                "store a4194304", "wait b0", "store b0"}));
}

}  // namespace tessera::testing

// Units that are updated while the backward goes on, against the usual step.
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/manifest.h"
#include "tessera/io/file.h"
#include "tessera/offload/states.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"
#include "tests/support/saved.h"
#include "tests/support/training.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;
using shard::Residence;

namespace {

constexpr double kLimit = 0.05;  // below the toy's norms

// Norms and states of a training, as rank 0 has them; `step` is given what it may keep from step to step.
ToyTrained trained_by(const engine::Options& all, int world, const offload::StateOptions& away,
                      const std::function<double(Engine&, double& kept)>& step) {
  ToyTrained trained;
  run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy;
    engine::Options options = all;
    if (away.residence != Residence::Device) options.zero.home = offload::state_homes(away);
    Engine engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()});
    std::vector<double> norms;
    double kept = 0;
    for (int number = 0; number < 4; ++number) {
      toy_forward(engine, toy, toy_batch(rank, number)).backward();
      norms.push_back(step(engine, kept));
    }
    std::vector<at::Tensor> states = all_states(engine);
    if (rank == 0) trained = {std::move(states), std::move(norms)};
  });
  return trained;
}

ToyRun by_previous(int stage, double limit = kLimit) {
  return {.stage = stage, .clip = 0, .in_backward = true, .previous_clip = limit};
}

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

// What a user has written is what differs from the engine's last write, which is over when it is noted.
TEST(UpdateInBackward, TakesOverWhatAUserWrites) {
  ToyTraining writes;
  writes.loss = [](const Toy& toy, Engine& engine, const at::Tensor& x, int, int number) {
    fill(toy.tensors[4].detach()[number], 0.25);
    return toy_forward(engine, toy, x);
  };
  for (const size_t m : {1, 2, 3})
    for (const int world : {1, 2})
      for (int stage = 1; stage <= 2; ++stage) {
        const ToyRun run{.stage = stage, .clip = 0, .precision = all_modes()[m]};
        expect_same(train_toy(in_backward(run), world, writes), train_toy(run, world, writes),
                    c10::str("mode ", m, ", ", world, " ranks, stage ", stage));
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

// The usual step that is given the norm of the one before, in place of its own, does the same.
TEST(UpdateInBackward, ClipsByTheNormOfTheStepBefore) {
  const io::TempFolder folder;
  const std::vector<Residence> homes{Residence::Device, Residence::Nvme};
  const auto modes = all_modes();
  for (size_t m = 0; m < modes.size(); ++m)
    for (const int world : {1, 2})
      for (int stage = 1; stage <= 3; ++stage) {
        const offload::StateOptions away{.residence = homes[(m + world + stage) % homes.size()],
                                         .folder = folder.path()};
        ToyRun run = by_previous(stage);
        run.precision = modes[m];
        const engine::Options early = toy_options(run);
        engine::Options usual = early;
        usual.zero.update_in_backward = false;
        usual.gradient_clipping = std::exchange(usual.zero.previous_clipping, 0);
        const ToyTrained expected = trained_by(usual, world, away, [](Engine& engine, double& before) {
          const double norm = engine.grad_norm();
          engine.step({}, std::exchange(before, norm));
          return norm;
        });
        const ToyTrained found = trained_by(early, world, away, [](Engine& engine, double&) {
          engine.step();
          return engine.global_grad_norm().value();
        });
        const std::string what =
            c10::str("mode ", m, ", ", world, " ranks, stage ", stage, ", states ", int(away.residence));
        expect_same(found, expected, what);
        EXPECT_GT(*std::ranges::min_element(found.numbers), kLimit) << what;
      }
}

// A checkpoint has it: what goes on clips as if it had not stopped, in any stage. One that has none does not clip at first.
TEST(UpdateInBackward, GoesOnClippingByTheNormOfTheStepBefore) {
  for (const int world : {1, 2}) {
    const io::TempFolder folder;
    run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
      const Toy toy;
      struct Resumed {
        Toy toy{7};
        Engine engine;
        Resumed(const ToyRun& run, const comm::GroupPtr& group, const std::string& folder)
            : engine(toy_engine(run, toy, group)) {
          engine.checkpoints().open(folder, "", {})->apply();
        }
        Values trained(int rank, int steps) {
          train(engine, toy, rank, 3, steps);
          return values_of(engine);
        }
      };
      Engine engine = toy_engine(by_previous(2), toy, group);
      EXPECT_FALSE(engine.previous_norm());
      train(engine, toy, rank, 0, 3);
      engine.checkpoints().save(folder.path(), {});
      const auto norm = engine.previous_norm();
      EXPECT_EQ(norm, engine.global_grad_norm());
      train(engine, toy, rank, 3, 2);
      const Values was = values_of(engine);
      for (int stage = 1; stage <= 3; ++stage) {
        Resumed again(by_previous(stage), group, folder.path());
        EXPECT_EQ(again.engine.previous_norm(), norm);
        expect_same(again.trained(rank, 2).second, was.second, at::kFloat, c10::str("stage ", stage));
      }
      group->barrier("saved");
      const std::string path = folder / "global_step3/manifest.json";
      if (rank == 0) {
        auto manifest = nlohmann::ordered_json::parse(io::read_text(path, 1 << 30));
        manifest.erase("crc32c");
        manifest["run"]["counters"].erase("norm");
        std::ofstream(path) << checkpoint::sealed(manifest.dump());
      }
      group->barrier("as an older one");
      Resumed older(by_previous(2), group, folder.path()),
          loose(in_backward({.stage = 2, .clip = 0}), group, folder.path());
      EXPECT_FALSE(older.engine.previous_norm());
      expect_same(older.trained(rank, 1).second, loose.trained(rank, 1).second, at::kFloat, "without a norm");
    });
  }
  // Other ranks.
  const io::TempFolder folder;
  std::optional<double> norm;
  for (const int world : {2, 1})
    run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
      const Toy toy;
      Engine engine = toy_engine(by_previous(world), toy, group);
      if (world == 2) {
        train(engine, toy, rank, 0, 2);
        engine.checkpoints().save(folder.path(), {});
        if (rank == 0) norm = engine.previous_norm();
      } else {
        engine.checkpoints().open(folder.path(), "", {})->apply();
        EXPECT_TRUE(norm && engine.previous_norm() == norm);
      }
    });
}

// Its step has updated the model; the next backward says so, until a checkpoint is loaded. Without a limit nobody looks.
TEST(UpdateInBackward, RefusesToClipByANormThatIsNotFinite) {
  for (const int world : {1, 2}) {
    const io::TempFolder folder, after;
    run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
      const Toy toy, other;
      Engine engine = toy_engine(by_previous(2), toy, group), loose = toy_engine(by_previous(2, 0), other, group);
      const auto step_on = [&](Engine& one, const Toy& model, double factor) {
        toy_forward(one, model, toy_batch(rank, 0) * factor).backward();
        one.step();
      };
      step_on(engine, toy, 1);
      engine.checkpoints().save(folder.path(), {});
      step_on(engine, toy, 1);
      const Values expected = values_of(engine);
      step_on(engine, toy, rank + 1 == world ? std::numeric_limits<double>::infinity() : 1);
      EXPECT_EQ(engine.global_steps(), 3);
      engine.checkpoints().save(after.path(), {});
      for (int tries = 0; tries < 3; ++tries) {
        EXPECT_HAS(error_of([&] { step_on(engine, toy, 1); }), "the norm of step 3");
        if (tries == 1) engine.checkpoints().open(after.path(), "", {})->apply();
      }
      engine.checkpoints().open(folder.path(), "", {})->apply();
      step_on(engine, toy, 1);
      expect_same(values_of(engine).second, expected.second, at::kFloat, "loaded");
      const auto norm = engine.previous_norm();
      engine.count_empty_steps();
      engine.step();
      EXPECT_EQ(engine.previous_norm(), norm);
      for (const double factor : {std::numeric_limits<double>::infinity(), 1.0})
        step_on(loose, other, factor);
      if (world == 1) return;
      engine.set_previous_norm(1.5 + rank);
      EXPECT_HAS(error_of([&] { step_on(engine, toy, 1); }), "rank 0 has norm 1.5");
    });
  }
}

TEST(UpdateInBackward, RefusesWhatItCannotDo) {
  const Toy toy;
  const auto refused = [&](ToyRun run, const std::string& text) {
    EXPECT_HAS(error_of([&] { toy_engine(run, toy, comm::single_group()); }), text);
  };
  refused({.stage = 1, .in_backward = true}, "gradient_clipping 1");
  refused({.stage = 0, .clip = 0, .in_backward = true}, "stage 0");
  refused({.stage = 0, .clip = 0, .previous_clip = 1}, "need zero.update_in_backward");
  refused({.stage = 1, .clip = 0, .in_backward = true, .unit_clip = 1, .previous_clip = 1}, "by unit beside");
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

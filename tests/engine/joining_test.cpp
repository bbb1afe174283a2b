// Parameters that come later: param groups, tensors of nobody's, checkpoints. Modes and stages of what joins are in
// tests/zero/joining_test.cpp, plain PyTorch beside it in tests/python/engine/test_joining.py.
#include <gtest/gtest.h>

#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/saved.h"

namespace tessera::testing {

namespace {

// y = toy * extra, where `extra` came later.
void train_with(Engine& engine, const Toy& toy, const at::Tensor& extra, int rank, int from, int steps) {
  for (int micro = from; micro < from + steps; ++micro) {
    engine.pre_forward();
    const at::Tensor loss = (toy.outputs(toy_batch(rank, micro), &engine) * extra).square().mean();
    engine.post_forward({loss});
    loss.backward();
    engine.step();
  }
}

}  // namespace

// Beside one that had it all from the start; rank 0's values of it hold.
TEST(Joining, AParameterOfANewGroupTrainsAsOneThatWasThere) {
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
        optim::GroupOptions slow = toy_adamw();
        slow.lr = 0.001;
        const auto values = [&](bool late) {
          const Toy toy;
          std::vector<engine::ParamSpec> specs = toy.specs();
          engine::ParamSpec extra{"extra", at::full({3}, late ? 1.0 + rank : 1.0).requires_grad_(true), 1, "root"};
          if (!late) specs.push_back(extra);
          const std::vector<optim::GroupOptions> groups{toy_adamw(), slow};
          Engine engine(toy_options({.stage = stage, .clip = 0}), comm::Mesh(group), specs,
                        late ? std::vector{toy_adamw()} : groups);
          if (late) {
            extra.group = -1;
            extra.joins = engine.add_group(slow);
            EXPECT_EQ(engine.add_param(extra), 5);
            EXPECT_HAS(error_of([&] { engine.add_param(extra); }), "'extra' is given more than once");
            engine.join();
          }
          train_with(engine, toy, extra.tensor, rank, 0, 3);
          return values_of(engine);
        };
        const Values is = values(true), was = values(false);
        expect_same(is.masters, was.masters, at::kFloat, "master");
        expect_same(is.first, was.first, at::kFloat, "moment");
        EXPECT_EQ(is.steps, was.steps);
      });
    }
  }
}

TEST(Joining, AGroupThatNeedsOtherStatesIsRefused) {
  const Toy toy;
  engine::Options options = toy_options({});
  options.rule = optim::Rule::Sgd;
  optim::GroupOptions group;
  Engine engine(options, comm::Mesh(), toy.specs(), {group});
  group.momentum = 0.9;
  for (int i = 0; i < 2; ++i)
    EXPECT_HAS(message_of<c10::ValueError>([&] { engine.add_group(group); }), "has momentum");
  EXPECT_EQ(engine.groups().size(), 1);
  const auto refused = [&](const at::Tensor& tensor) {
    const engine::ParamSpec param{.name = "extra", .tensor = tensor, .unit = "root", .joins = 0};
    return message_of<c10::ValueError>([&] { engine.add_param(param); });
  };
  EXPECT_HAS(refused(at::ones({2}, at::kDouble).requires_grad_(true)), "'extra' is Double");
  EXPECT_HAS(refused(toy.tensors[0].detach().requires_grad_(true)), "'extra' lies in the memory of");
  EXPECT_EQ(engine.params().size(), 5);
  EXPECT_EQ(engine.add_param({.name = "extra", .tensor = at::ones({2}).requires_grad_(true), .joins = 0}), 5);
}

// What no group has, or had none of, in p.grad.
TEST(Joining, GradientsFromBeforeItsGroupHasItDoNotCount) {
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
        const Toy toy;
        std::vector<engine::ParamSpec> specs = toy.specs();
        specs[3].tensor.set_requires_grad(false);
        specs[3].group = -1;
        Engine engine(toy_options({.stage = stage, .clip = 0}), comm::Mesh(group), specs, {toy_adamw()});
        at::Tensor late = at::Tensor(toy.tensors[3]).set_requires_grad(true),
                   extra = at::ones({3}).requires_grad_(true);
        train_with(engine, toy, extra, rank, 0, 2);
        EXPECT_FALSE(late.grad().defined()) << "step() drops it";
        engine.set_joins(3, 0);
        engine.add_param({.name = "extra", .tensor = extra, .joins = 0});
        EXPECT_TRUE(extra.grad().defined());
        engine.join();
        at::Tensor expected = at::zeros({3});
        for (int each = 0; each < world; ++each) {
          const at::NoGradGuard no_grad;
          engine.pre_forward();
          const at::Tensor out = toy.outputs(toy_batch(each, 2), &engine);
          engine.post_forward({out});
          expected += 2 * out.square().sum(0) / out.numel() / world;
        }
        engine.pre_forward();
        const at::Tensor loss = (toy.outputs(toy_batch(rank, 2), &engine) * extra).square().mean();
        engine.post_forward({loss});
        loss.backward();
        if (stage < 2) engine.grad_norm();  // reduces
        EXPECT_TRUE(at::allclose(engine.states().get_full(5, Quantity::Gradient), expected)) << "in stage " << stage;
        engine.step();
      });
    }
  }
}

// Saved by an engine where it has joined, loaded where it was trained from the start, and the other way round.
TEST(Joining, CheckpointsKnowNoDifference) {
  for (int stage = 0; stage <= 3; ++stage) {
    const io::TempFolder folder;
    Values was;
    const auto on = [&](bool late, bool load) {
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        const Toy toy;
        std::vector<engine::ParamSpec> specs = toy.specs();
        if (late) {
          specs[3].tensor.set_requires_grad(false);
          specs[3].group = -1;
          specs[3].joins = 0;
        }
        Engine engine(toy_options({.stage = stage, .clip = 0}), comm::Mesh(group), specs, {toy_adamw()});
        at::Tensor(toy.tensors[3]).set_requires_grad(true);
        const std::string path = folder.path();
        if (!load) {
          train(engine, toy, rank, 0, 2);
          engine.checkpoints().save(path, {});
        } else {
          engine.checkpoints().open(path, "", {})->apply();
        }
        const Values v = values_of(engine);
        if (rank != 0) return;
        if (!load) was = v;
        if (load) {
          expect_same(v.masters, was.masters, at::kFloat, "master");
          expect_same(v.second, was.second, at::kFloat, "moment");
          EXPECT_EQ(v.steps, was.steps);
        }
      });
    };
    for (const bool late : {false, true}) {
      on(late, false);
      on(!late, true);
    }
  }
}

}  // namespace tessera::testing

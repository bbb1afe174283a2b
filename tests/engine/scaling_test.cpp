// Loss scaling from scale() to step(), in every stage: the guard, the schedules, and what the gradients are divided by.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "tessera/engine/engine.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

namespace {

const amp::ScalerOptions kDynamic{.dynamic = true, .initial = 256, .window = 1000};

ToyRun fp16_run(amp::ScalerOptions scaler = kDynamic) {
  ToyRun run;
  run.fp16 = true;
  run.scaler = scaler;
  return run;
}

at::Tensor forward(const ToyRank& on, int micro = 0) {
  return toy_forward(on.engine, on.toy, toy_batch(on.rank, micro));
}

template <class F>
void expect_refused(F&& backward, const std::string& what) {
  try {
    backward();
    ADD_FAILURE() << what << ": no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("Loss scaling is required"), std::string::npos) << error.what();
  }
}

std::vector<at::Tensor> weights(const ToyRank& on) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < on.toy.tensors.size(); ++i)
    result.push_back(on.engine.states().get_full(i, Quantity::Master));
  return result;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].equal(b[i])) return false;
  }
  return true;
}

// A forward whose gradients are not finite, on one rank or all.
at::Tensor poisoned(const ToyRank& on, bool here) {
  const at::Tensor loss = forward(on);
  return here ? loss * std::numeric_limits<float>::infinity() : loss;
}

}  // namespace

TEST(Scaling, AnUnscaledBackwardIsRefusedOnEveryRankAndLeavesNothing) {
  over_stages({1, 2}, fp16_run(), [](const ToyRank& on) {
    const std::string what = "stage " + std::to_string(on.stage);
    expect_refused([&] { forward(on).backward(); }, what);
    for (const at::Tensor& t : on.toy.tensors)
      EXPECT_FALSE(t.grad().defined()) << what;
    EXPECT_FALSE(on.engine.has_gradients()) << what;
    on.engine.scaling().scale(forward(on)).backward();
    std::vector<at::Tensor> once;
    for (int i = 0; i < 5; ++i)
      once.push_back(on.engine.states().get_full(i, Quantity::Gradient));
    EXPECT_TRUE(on.engine.step()) << what;
    // Forgotten in the next iteration, and in the one after.
    for (int i = 0; i < 2; ++i)
      expect_refused([&] { forward(on).backward(); }, what + ", second step");
    on.engine.backward(forward(on));
    EXPECT_TRUE(on.engine.step());
    EXPECT_EQ(on.engine.skipped_steps(), 0);
    ASSERT_EQ(once.size(), 5U);
    for (const at::Tensor& grad : once)
      EXPECT_TRUE(grad.defined() && grad.isfinite().all().item<bool>());
  });
}

TEST(Scaling, AMicroBatchThatWasRefusedDoesNotCount) {
  ToyRun run = fp16_run();
  run.accumulation = 2;
  over_stages({1, 2}, run, [](const ToyRank& on) {
    on.engine.scaling().scale(forward(on, 0)).backward();
    on.engine.step();
    expect_refused([&] { forward(on, 1).backward(); }, "second micro-batch");
    on.engine.scaling().scale(forward(on, 1)).backward();
    std::vector<at::Tensor> grads;
    for (int i = 0; i < 5; ++i)
      grads.push_back(on.engine.states().get_full(i, Quantity::Gradient));
    on.engine.zero_grad();
    EXPECT_EQ(on.engine.micro_steps(), 1);
    on.engine.set_gradient_accumulation_boundary(false);
    on.engine.scaling().scale(forward(on, 0)).backward();
    on.engine.set_gradient_accumulation_boundary(true);
    on.engine.scaling().scale(forward(on, 1)).backward();
    for (int i = 0; i < 5; ++i)
      EXPECT_TRUE(on.engine.states().get_full(i, Quantity::Gradient).equal(grads[i]))
          << on.stage << " " << Toy::kNames[i];
  });
}

TEST(Scaling, OtherShapesOfBackward) {
  over_stages({1, 2}, fp16_run(), [](const ToyRank& on) {
    const at::Tensor g = at::ones({4, 3}, at::kHalf) / 8;
    const auto output = [&] {
      on.engine.pre_forward();
      at::Tensor y = on.toy.outputs(toy_batch(on.rank, 0), &on.engine);
      on.engine.post_forward({y});
      return y;
    };
    expect_refused([&] { output().backward(g); }, "out.backward(g)");
    expect_refused([&] { torch::autograd::backward({output(), output()}, {g, g}); }, "autograd.backward");
    on.engine.scaling().scale(output()).backward(g);
    const at::Tensor scaled = on.engine.states().get_full(4, Quantity::Gradient);
    on.engine.zero_grad();
    on.engine.scaling().scale((output() * g).to(at::kFloat).sum()).backward();
    EXPECT_TRUE(at::allclose(on.engine.states().get_full(4, Quantity::Gradient), scaled, 1e-2,
                             1e-2 * scaled.abs().max().item<double>()));
    on.engine.zero_grad();
    torch::autograd::backward({on.engine.scaling().scale(output()), on.engine.scaling().scale(output())}, {g, g});
    EXPECT_TRUE(at::allclose(on.engine.states().get_full(4, Quantity::Gradient), 2 * scaled, 1e-2,
                             1e-2 * scaled.abs().max().item<double>()));
    on.engine.zero_grad();
    // Gradients that reach no parameter need no scale; backward with inputs does.
    const at::Tensor x = toy_batch(on.rank, 0).requires_grad_(true);
    at::Tensor loss = toy_forward(on.engine, on.toy, x);
    EXPECT_EQ(torch::autograd::grad({loss}, {x}).size(), 1U);
    EXPECT_FALSE(on.engine.has_gradients());
    loss = toy_forward(on.engine, on.toy, x);
    expect_refused([&] { loss.backward({}, false, false, at::TensorList(on.toy.tensors[4])); }, "backward(inputs)");
    EXPECT_FALSE(on.toy.tensors[4].grad().defined());
    EXPECT_FALSE(on.engine.states().get_full(4, Quantity::Gradient).defined());
  });
}

TEST(Scaling, OneScaleAllowsOneBackward) {
  over_stages({1, 2}, fp16_run(), [](const ToyRank& on) {
    const at::Tensor loss = forward(on);
    const at::Tensor scaled = on.engine.scaling().scale(loss);
    scaled.backward({}, /*retain_graph=*/true);
    const at::Tensor once = on.engine.states().get_full(3, Quantity::Gradient);
    expect_refused([&] { scaled.backward({}, /*retain_graph=*/true); }, "used again");
    on.engine.scaling().scale(loss).backward();
    EXPECT_TRUE(at::allclose(on.engine.states().get_full(3, Quantity::Gradient), 2 * once, 1e-3, 1e-3));
    EXPECT_TRUE(on.engine.step());
  });
}

TEST(Scaling, TermsBesideTheOutputsAreRefusedWithThem) {
  over_stages({1, 2}, fp16_run(), [](const ToyRank& on) {
    const auto joint = [&] {
      const at::Tensor loss = forward(on);
      return loss + on.toy.tensors[0].to(at::kFloat).square().sum();  // "a" is resident in stage 3
    };
    expect_refused([&] { joint().backward(); }, "penalty");
    for (int i = 0; i < 5; ++i)
      EXPECT_FALSE(on.engine.states().get_full(i, Quantity::Gradient).defined()) << on.stage << Toy::kNames[i];
    on.engine.scaling().scale(joint()).backward();
    EXPECT_TRUE(on.engine.step());
  });
}

// conformance 2.7: the module is called directly, nothing is scaled, nothing is refused; the update has its usual size.
TEST(Scaling, GraphsBesideTheEngineAreNotGuarded) {
  over_stages({1, 2}, fp16_run(), [](const ToyRank& on) {
    on.engine.regions().open({0, 1, 2, 3, 4});
    on.toy.loss(toy_batch(on.rank, 0)).backward();
    on.engine.regions().close({0, 1, 2, 3, 4});
    const double bypassed = on.engine.grad_norm();
    on.engine.zero_grad();
    on.engine.backward(forward(on));
    EXPECT_NEAR(bypassed, on.engine.grad_norm(), 1e-3 * bypassed);
    EXPECT_TRUE(on.engine.step());
  });
}

TEST(Scaling, StaticScalesAreGuardedAndOneIsNone) {
  over_stages({1, 2}, fp16_run(amp::ScalerOptions::fixed(64)), [](const ToyRank& on) {
    expect_refused([&] { forward(on).backward(); }, "static");
    on.engine.backward(poisoned(on, on.rank == 0));
    EXPECT_FALSE(on.engine.step());
    EXPECT_EQ(on.engine.scaling().scaler().scale(), 64);
    EXPECT_EQ(on.engine.skipped_steps(), 1);
  });
  over_stages({1, 2}, fp16_run(amp::ScalerOptions::fixed(1)), [](const ToyRank& on) {
    const at::Tensor loss = forward(on);
    EXPECT_TRUE(on.engine.scaling().scale(loss).is_same(loss));
    loss.backward();
    EXPECT_TRUE(on.engine.step());
    on.engine.scaling().override_scale(8);
    expect_refused([&] { forward(on).backward(); }, "overridden");
    on.engine.scaling().scale(forward(on)).backward();
    EXPECT_EQ(on.engine.scaling().gradient_scale(), 8);
    EXPECT_TRUE(on.engine.step());
  });
}

TEST(Scaling, NeedsATensorWithAGraph) {
  over_stages({1}, fp16_run(), [](const ToyRank& on) {
    for (const at::Tensor& t : {at::ones({1}), at::Tensor(), on.toy.tensors[0]}) {
      EXPECT_THROW(on.engine.scaling().scale(t), c10::ValueError);
      EXPECT_THROW(on.engine.begin_backward(t), c10::ValueError);
    }
    EXPECT_THROW(on.engine.scaling().scale(at::ones({1}, at::kLong)), c10::ValueError);
  });
}

// Powers of two change no bit of fp32 gradients, so a scaled run is the plain one: norm, clipping, update, any stage.
TEST(Scaling, PowersOfTwoChangeNoBit) {
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      std::vector<std::vector<at::Tensor>> results(2);
      std::vector<std::vector<double>> norms(2);
      for (const bool scaled : {false, true}) {
        ToyRun run;
        run.stage = stage;
        run.accumulation = 2;
        run.clip = 0.5;
        if (scaled) run.scaler = {.dynamic = true, .initial = 1024, .window = 2};
        run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
          const Toy toy;
          Engine engine = toy_engine(run, toy, group);
          const ToyRank on{engine, toy, rank, stage, group};
          for (int micro = 0; micro < 12; ++micro) {
            // In the middle of a window, too: gradients keep the scale that held at its begin.
            if (scaled && micro == 5) engine.scaling().set_scale(64);
            engine.scaling().scale(forward(on, micro)).backward();
            if (scaled && micro == 5) {
              EXPECT_EQ(engine.scaling().gradient_scale(), 2048);
            }
            if (engine.step() && rank == 0) norms[scaled].push_back(*engine.global_grad_norm());
          }
          if (scaled) {
            EXPECT_EQ(engine.scaling().scaler().scale(), 256) << "two growths after 64";
          }
          auto mine = weights(on);
          if (rank == 0) results[scaled] = std::move(mine);
        });
      }
      EXPECT_TRUE(same(results[0], results[1])) << "world " << world << " stage " << stage;
      EXPECT_EQ(norms[0], norms[1]);
    }
  }
}

// Gradients that fp16 cannot hold unscaled, and the arithmetic of a loop written by hand; both ways to scale.
void expect_the_plain_loop(int world, int stage, int accumulation) {
  // Several micro-batches: every addition rounds the larger part to 11 bits, in stages 2 and 3 in another order, and the
  // mean may be much smaller than its parts. So whole masters and the norm are compared, not single gradients.
  const bool rounds_often = accumulation > 1;
  const double ulp = rounds_often ? std::ldexp(1.0, -10) : 1e-5;
  run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
    ToyRun run = fp16_run(amp::ScalerOptions::fixed(512));
    run.stage = stage;
    run.accumulation = accumulation;
    const Toy toy;
    Engine engine = toy_engine(run, toy, group);
    const ToyRank on{engine, toy, rank, stage, group};
    ToyReference reference(at::kHalf, world, accumulation, run.clip, 512);
    const std::string what = "stage " + std::to_string(stage) + " accumulation " + std::to_string(accumulation) + " ";
    for (int step = 0; step < 4; ++step) {
      for (int micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
        if (micro % 2 == 1) {
          engine.backward(forward(on, micro));
        } else {
          engine.scaling().scale(forward(on, micro)).backward();
        }
        if (micro + 1 < (step + 1) * accumulation) {
          EXPECT_FALSE(engine.step());
        }
      }
      reference.step();
      for (int i = 0; i < 5; ++i) {
        const at::Tensor gap = engine.states().get_full(i, Quantity::Gradient) / 512 - reference.grads[i];
        if (!rounds_often) {
          EXPECT_LE(gap.abs().max().item<double>(), ulp * reference.grads[i].abs().max().item<double>())
              << what << Toy::kNames[i];
        }
      }
      EXPECT_TRUE(engine.step());
      EXPECT_NEAR(*engine.global_grad_norm(), reference.norm, ulp * reference.norm);
      for (int i = 0; i < 5; ++i) {
        const at::Tensor expected = reference.masters()[i];
        const double apart = (engine.states().get_full(i, Quantity::Master) - expected).norm().item<double>();
        EXPECT_LE(apart, (rounds_often ? ulp : 1e-6) * expected.norm().item<double>()) << what << Toy::kNames[i];
      }
    }
  });
}

TEST(Scaling, Fp16IsThePlainLoopWithAScale) {
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const int accumulation : {1, 2})
        expect_the_plain_loop(world, stage, accumulation);
    }
  }
}

TEST(Scaling, OverflowOnOneRankSkipsTheStepOnAll) {
  const amp::ScalerOptions zero{.dynamic = true, .initial = 16, .window = 3, .hysteresis = 2};
  const std::string steps = "x.x...x";
  const std::vector<double> expected{16, 16, 8, 8, 8, 16, 16};
  over_stages({1, 2}, fp16_run(zero), [&](const ToyRank& on) {
    int64_t skipped = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      const bool bad = steps[i] == 'x';
      const auto before = weights(on);
      on.engine.backward(poisoned(on, bad && on.rank == on.group->size() - 1));
      EXPECT_EQ(on.engine.step(), !bad);
      skipped += bad ? 1 : 0;
      EXPECT_EQ(same(before, weights(on)), bad) << "stage " << on.stage << " step " << i;
      EXPECT_EQ(on.engine.was_step_applied(), !bad);
      EXPECT_EQ(on.engine.skipped_steps(), skipped);
      EXPECT_EQ(on.engine.global_steps(), static_cast<int64_t>(i) + 1);
      EXPECT_EQ(on.engine.scaling().scaler().scale(), expected[i]) << "stage " << on.stage << " step " << i;
      EXPECT_FALSE(on.engine.has_gradients());
    }
    EXPECT_EQ(on.engine.states().param_step(3), 4);
  });
}

TEST(Scaling, AtTheMinimumEveryRankHasAnErrorAndMayGoOn) {
  amp::ScalerOptions options{.dynamic = true, .initial = 2, .window = 2};
  options.error_at_minimum = true;
  over_stages({1, 2}, fp16_run(options), [&](const ToyRank& on) {
    on.engine.backward(poisoned(on, on.rank == 0));
    EXPECT_FALSE(on.engine.step());
    on.engine.backward(poisoned(on, on.rank == 0));
    EXPECT_THROW(on.engine.step(), c10::Error);
    EXPECT_EQ(on.engine.skipped_steps(), 2);
    EXPECT_EQ(on.engine.global_steps(), 2);
    EXPECT_FALSE(on.engine.has_gradients());
    on.engine.backward(forward(on));
    EXPECT_TRUE(on.engine.step());
  });
}

TEST(Scaling, NormIsThatOfUnscaledGradientsAndTheScalerGoesOnFromItsState) {
  ToyRun plain;
  over_stages({1, 2}, plain, [](const ToyRank& on) {
    on.engine.backward(forward(on));
    const double norm = on.engine.grad_norm();
    on.engine.zero_grad();
    on.engine.scaling().override_scale(4096);
    on.engine.backward(forward(on));
    EXPECT_EQ(on.engine.grad_norm(), norm);
    const auto state = on.engine.scaling().scaler().state();
    on.engine.step();
    EXPECT_EQ(*on.engine.global_grad_norm(), norm);
    on.engine.scaling().override_scale(1);
    on.engine.scaling().restore(state);
    EXPECT_EQ(on.engine.scaling().scaler().scale(), 4096);
    EXPECT_TRUE(on.engine.scaling().scaler().needed());
  });
}

namespace {

// Two engines under one loss: `scaled` with a loss scale, `other` as the test wants it.
struct Pair {
  Toy a{1}, b{2};
  Engine first, second;

  Pair(const ToyRun& of_a, const ToyRun& of_b, const comm::GroupPtr& group)
      : first(toy_engine(of_a, a, group)), second(toy_engine(of_b, b, group->sibling())) {}
  at::Tensor joint(int rank) {
    return toy_forward(first, a, toy_batch(rank, 0)) + 3 * toy_forward(second, b, toy_batch(rank, 1));
  }
  // `second` reads what `first` made.
  at::Tensor chained(int rank) {
    first.pre_forward();
    const at::Tensor y = a.outputs(toy_batch(rank, 0), &first);
    first.post_forward({y});
    second.pre_forward();
    const at::Tensor x = at::cat({y, y, y, y, y, y}, 1).narrow(1, 0, 17).to(at::kFloat);
    const at::Tensor loss = b.loss(x, &second);
    second.post_forward({loss});
    return loss;
  }
};

std::vector<double> norms(Pair& pair) {
  return {pair.first.grad_norm(), pair.second.grad_norm()};
}

void over_pairs(const ToyRun& of_a, const ToyRun& of_b, const std::function<void(Pair&, int rank)>& body) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      ToyRun a = of_a, b = of_b;
      a.stage = stage;
      b.stage = 3 - stage;
      Pair pair(a, b, group);
      body(pair, rank);
    });
  }
}

}  // namespace

TEST(Scaling, AnotherEngineOfTheLossKnowsTheScale) {
  for (const bool bf16 : {false, true}) {
    ToyRun other;
    other.bf16 = bf16;
    over_pairs(fp16_run(), other, [&](Pair& pair, int rank) {
      // Without scale for reference: outputs of `first` are beside the guard with its scale at 1.
      pair.first.scaling().set_scale(1);
      std::vector<std::vector<double>> plain;
      for (const bool chain : {false, true}) {
        pair.first.scaling().scale(chain ? pair.chained(rank) : pair.joint(rank)).backward();
        plain.push_back(norms(pair));
        pair.first.zero_grad();
        pair.second.zero_grad();
      }
      pair.first.scaling().set_scale(1024);
      for (const bool chain : {false, true}) {
        for (const bool direct : {true, false}) {
          const at::Tensor loss = chain ? pair.chained(rank) : pair.joint(rank);
          if (direct) {
            pair.first.scaling().scale(loss).backward();
          } else {
            pair.first.backward(loss);
          }
          const auto got = norms(pair);
          EXPECT_NEAR(got[0], plain[chain][0], 2e-3 * plain[chain][0]);
          EXPECT_NEAR(got[1], plain[chain][1], (bf16 || chain ? 5e-3 : 1e-6) * plain[chain][1]);
          pair.first.zero_grad();
          pair.second.zero_grad();
        }
      }
      expect_refused([&] { pair.joint(rank).backward(); }, "joint");
      pair.second.zero_grad();  // what came before the refusal stays, as in any backward that throws
      pair.first.scaling().scale(pair.joint(rank)).backward();
      EXPECT_TRUE(pair.first.step());
      EXPECT_TRUE(pair.second.step());
    });
  }
}

TEST(Scaling, AnEngineWithoutAScaleSkipsWhatAnothersScaleMadeOverflow) {
  over_pairs(fp16_run(), ToyRun{}, [&](Pair& pair, int rank) {
    const at::Tensor poison = pair.joint(rank) * (rank == 1 ? std::numeric_limits<float>::infinity() : 1.0F);
    pair.first.scaling().scale(poison).backward();
    EXPECT_FALSE(pair.first.step());
    EXPECT_FALSE(pair.second.step());
    EXPECT_EQ(pair.second.skipped_steps(), 1);
  });
}

TEST(Scaling, EnginesWithScalesAgreeOnTheSmallest) {
  amp::ScalerOptions large = kDynamic, small = kDynamic;
  large.initial = 4096;
  small.initial = 16;
  over_pairs(fp16_run(large), fp16_run(small), [&](Pair& pair, int rank) {
    expect_refused([&] { pair.first.scaling().scale(pair.joint(rank)).backward(); }, "the second was not asked");
    pair.first.zero_grad();
    pair.second.zero_grad();
    std::vector<std::vector<double>> got;
    const std::vector<std::function<void(const at::Tensor&)>> ways{
        [&](const at::Tensor& l) { pair.first.scaling().scale(pair.second.scaling().scale(l)).backward(); },
        [&](const at::Tensor& l) { pair.second.scaling().scale(pair.first.scaling().scale(l)).backward(); },
        [&](const at::Tensor& l) { pair.first.backward(pair.second.scaling().scale(l)); }};
    for (const auto& way : ways) {
      const at::Tensor loss = pair.joint(rank);
      const at::Tensor once = pair.first.scaling().scale(pair.second.scaling().scale(loss));
      EXPECT_TRUE(at::allclose(once, 16 * loss));
      way(loss);
      got.push_back(norms(pair));
      pair.first.zero_grad();
      pair.second.zero_grad();
    }
    EXPECT_EQ(got[0], got[1]);
    EXPECT_EQ(got[0], got[2]);
    pair.first.scaling().scale(toy_forward(pair.first, pair.a, toy_batch(rank, 0))).backward();
    EXPECT_NEAR(pair.first.grad_norm(), got[0][0], 2e-3 * got[0][0]);
    // Half scaled cannot be told apart later.
    const at::Tensor half = pair.first.scaling().scale(toy_forward(pair.first, pair.a, toy_batch(rank, 0))) +
                            toy_forward(pair.second, pair.b, toy_batch(rank, 0));
    EXPECT_THROW(pair.second.scaling().scale(half), c10::ValueError);
    EXPECT_TRUE(pair.first.step());
  });
}

}  // namespace tessera::testing

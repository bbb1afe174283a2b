// Ranks that differ in what they step by are told on all of them, with nothing updated. Stages and front ends of Python are in
// tests/python/engine/test_ranks_differ.py.
#include "tessera/engine/agreement.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>

#include "tests/support/errors.h"
#include "tests/support/saved.h"

namespace tessera::testing {

using comm::Axis;

TEST(Agreement, RanksOfEveryAxisCompareRatesAtAStep) {
  for (const AxisSizes& sizes : std::vector<AxisSizes>{{{Axis::DpShard, 3}},
                                                       {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}},
                                                       {{Axis::DpReplicate, 3}, {Axis::DpShard, 1}},
                                                       {{Axis::DpShard, 2}, {Axis::Tp, 2}},
                                                       {{Axis::DpShard, 1}, {Axis::Tp, 2}}}) {
    for (const bool in_backward : {false, true}) {
      if (in_backward && sizes.contains(Axis::DpReplicate)) continue;  // excluded
      for (int stage = in_backward ? 1 : 0; stage <= 3; ++stage) {
        int world = 1;
        for (const auto& [axis, size] : sizes)
          world *= size;
        for (const int odd : {1, world - 1}) {
          std::mutex mutex;
          std::vector<std::string> texts;
          run_axes(sizes, [&](int rank, const comm::Mesh& mesh) {
            const Toy toy;
            const ToyRun run{.stage = stage, .clip = 0, .in_backward = in_backward};
            Engine engine(toy_options(run), mesh, toy.specs(), {toy_adamw(), toy_adamw()});
            const int batch = mesh.rank(comm::kBatchAxes);
            train(engine, toy, batch, 0, 1);
            const std::vector<at::Tensor> before = values_of(engine).masters;
            if (rank == odd) engine.groups()[1].weight_decay = 0.25;
            const auto backward = [&] { toy_forward(engine, toy, toy_batch(batch, 1)).backward(); };
            if (!in_backward) backward();
            const std::string text = error_of([&] { in_backward ? backward() : (void)engine.step(); });
            EXPECT_EQ(engine.global_steps(), 1);
            EXPECT_EQ(engine.micro_steps(), 1);
            expect_same(values_of(engine).masters, before, at::kFloat, "master");
            engine.groups()[1].weight_decay = 0.25;
            if (in_backward) backward();
            engine.step();
            EXPECT_EQ(engine.global_steps(), 2);
            const std::scoped_lock lock(mutex);
            texts.push_back(text);
          });
          for (const std::string& text : texts)
            EXPECT_HAS(text, c10::str("ranks do not step alike: rank 0 has weight_decay 0.1 in param group 1, rank ",
                                      odd, " has weight_decay 0.25"));
        }
      }
    }
  }
}

// What one rank alone has against its step, and numbers of micro-batches that differ.
TEST(Agreement, RanksThatCannotStepAlikeAreRefusedAndGoOn) {
  struct Case {
    std::string said;
    std::function<void(Engine&)> before, after;  // of rank 1: ahead of step(), and to mend it
    int least_stage = 0;
    bool of_step_only = false;
  };
  const std::vector<zero::StateKind> kinds{zero::StateKind::OptimizerStates, zero::StateKind::Masters};
  const std::vector<Case> cases{
      {"rank 1 has [engine.step] It is illegal to call Engine.step() inside no_sync",
       [](Engine& e) { e.begin_no_sync(); }, [](Engine& e) { e.end_no_sync(); }, 0, true},
      {"states of this engine were moved off the device",
       [&](Engine& e) { e.offload_states(kinds, shard::Residence::Nvme); }, [](Engine& e) { e.reload_states(); }, 1},
      {"rank 0 has 1 calls of engine.step() in this update, rank 1 has 2 calls",
       [](Engine& e) { e.set_begun_micro_steps(1); }, [](Engine& e) { e.set_begun_micro_steps(0); }},
      {"rank 0 has loss scale 1, rank 1 has loss scale 4", [](Engine& e) { e.scaling().set_scale(4); },
       [](Engine& e) { e.scaling().set_scale(1); }},
  };
  for (const Case& c : cases) {
    for (int stage = c.least_stage; stage <= 3; ++stage) {
      SCOPED_TRACE(c10::str(c.said, " in stage ", stage));
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        const Toy toy;
        engine::Options options = toy_options({.stage = stage, .clip = 0});
        options.nvme_path = std::filesystem::temp_directory_path();
        Engine engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()});
        train(engine, toy, rank, 0, 1);
        const std::vector<at::Tensor> before = values_of(engine).masters;
        toy_forward(engine, toy, toy_batch(rank, 1)).backward();
        if (rank == 1) c.before(engine);
        std::vector<std::function<void()>> meetings{[&] { engine.step(); }, [&] { engine.norm_contribution(); }};
        if (!c.of_step_only) meetings.emplace_back([&] { engine.grad_norm(); });
        for (const auto& meet : meetings) {
          const std::string text = error_of(meet);
          EXPECT_HAS(text, c.said);
          EXPECT_HAS(text, "ranks do not step alike: rank 0 has ");
        }
        if (rank == 1) c.after(engine);
        expect_same(values_of(engine).masters, before, at::kFloat, "master");
        EXPECT_EQ(engine.global_steps(), 1);
        EXPECT_TRUE(engine.step());
        EXPECT_EQ(engine.global_steps(), 2);
      });
    }
  }
}

// The CPU stands for a device.
TEST(Agreement, NumbersOfAClientsOptimizerAreComparedWhereTheyAre) {
  for (const AxisSizes& sizes : std::vector<AxisSizes>{
           {{Axis::DpShard, 2}}, {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}}, {{Axis::DpShard, 1}, {Axis::Tp, 2}}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_axes(sizes, [&](int rank, const comm::Mesh& mesh) {
        const Toy toy;
        Engine engine(toy_options({.stage = stage, .clip = 0}), mesh, toy.specs(), {toy_adamw()});
        const auto step = [&](double first, double second, const char* line) {
          engine.set_client_terms({line}, {{"lr", "in param group 0", at::full({}, first)},
                                           {"lr", "in param group 1", at::full({1}, second)}});
          toy_forward(engine, toy, toy_batch(mesh.rank(comm::kBatchAxes), 0)).backward();
          const std::string text = error_of([&] { engine.step(); });
          engine.zero_grad();
          return text;
        };
        EXPECT_EQ(step(0.5, 0.25, "alpha 1"), "");
        const std::string swapped = rank == 1 ? step(0.25, 0.5, "alpha 1") : step(0.5, 0.25, "alpha 1");
        EXPECT_HAS(swapped, "rank 0 has lr 0.5 in param group 0, rank 1 has lr 0.25 in param group 0");
        EXPECT_HAS(step(0.5, 0.25, rank == 1 ? "alpha 2" : "alpha 1"), "rank 0 has alpha 1, rank 1 has alpha 2");
        EXPECT_EQ(step(0.5, 0.5, "alpha 1"), "");
        EXPECT_EQ(engine.global_steps(), 2);
      });
    }
  }
}

TEST(Agreement, RanksClipToTheSameNorm) {
  over_stages({2}, {.clip = 0}, [](const ToyRank& on) {
    toy_forward(on.engine, on.toy, toy_batch(on.rank, 0)).backward();
    const double norm = on.engine.grad_norm();
    EXPECT_HAS(error_of([&] { on.engine.clip_grad_norm(on.rank == 0 ? norm / 2 : norm / 4); }),
               "rank 0 has a call of engine.clip_grad_norm(");
    EXPECT_HAS(error_of([&] { on.engine.clip_grad_norm(on.rank == 0 ? -1 : norm / 4); }),
               "rank 0 has [engine.clip_grad_norm] max_norm must be a number >= 0, got -1, rank 1 has nothing");
    EXPECT_EQ(on.engine.grad_norm(), norm);
    EXPECT_EQ(on.engine.clip_grad_norm(norm / 2), norm);
    EXPECT_NEAR(on.engine.grad_norm(), norm / 2, norm * 1e-4);
    EXPECT_TRUE(on.engine.step());
  });
}

TEST(Agreement, MicroBatchesAreCountedByForwards) {
  over_stages({2}, {.accumulation = 2, .clip = 0}, [](const ToyRank& on) {
    const auto forward = [&] { return toy_forward(on.engine, on.toy, toy_batch(on.rank, 0)); };
    const bool odd = on.rank == 1;
    at::Tensor loss = forward();
    loss.backward({}, /*retain_graph=*/odd && on.stage < 2);
    if (odd && on.stage < 2) loss.backward();  // another loss of the same forward
    on.engine.step();
    if (odd && on.stage < 3) {
      on.engine.begin_no_sync();
      forward().backward();
      on.engine.end_no_sync();
    }
    forward().backward();
    EXPECT_TRUE(on.engine.step());
  });
}

TEST(Agreement, ADigestDistinguishesEveryField) {
  std::vector<optim::GroupOptions> groups{toy_adamw(), toy_adamw()};
  const auto digest = [&](const char* call, int64_t steps, int64_t empty, const char* fault = "") {
    return engine::StepTerms{
        .call = call, .accumulation_steps = steps, .empty_steps = empty, .groups = groups, .fault = fault}
        .digest();
  };
  const auto scaled = [&](double gradients, const amp::GradScaler::State& state) {
    return engine::StepTerms{
        .call = "step()", .accumulation_steps = 2, .groups = groups, .gradient_scale = gradients, .scaler = state}
        .digest();
  };
  const double same = digest("step()", 2, 0);
  EXPECT_EQ(digest("step()", 2, 0), same);
  for (const double other :
       {digest("grad_norm()", 2, 0), digest("step()", 3, 0), digest("step()", 2, 1),
        digest("step()", 2, 0, "a: replaced"), scaled(2, {}), scaled(1, {.scale = 2}), scaled(1, {.steps = 1}),
        scaled(1, {.good_steps = 1}), scaled(1, {.budget = 2}), scaled(1, {.overridden = true})})
    EXPECT_NE(other, same);
  groups[1].lr = std::nextafter(groups[1].lr, 1.0);
  EXPECT_NE(digest("step()", 2, 0), same);
}

}  // namespace tessera::testing

// Autocast of forward, and what travels in its dtype.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include "tessera/engine/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

namespace {

// Marked: the matrices w1 (85 elements, unit blocks.0) and w2 (15, blocks.1).
Engine marked_engine(const ToyRun& run, const Toy& toy, const comm::Mesh& mesh, std::optional<at::ScalarType> comm,
                     std::optional<at::ScalarType> others = {}) {
  auto options = toy_options(run);
  options.zero.communication = others;
  auto specs = toy.specs();
  for (auto& spec : specs) {
    if (spec.name[0] == 'w') spec.comm = comm;
  }
  return Engine(options, mesh, specs, {toy_adamw()});
}

// Wide matrices, so that padding does not count, and values that bf16 holds.
Toy exact_toy() {
  Toy toy;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(2);
  toy.tensors[3] = at::randn({17, 64}, generator, at::kFloat);
  toy.tensors[4] = at::randn({64, 3}, generator, at::kFloat);
  for (at::Tensor& t : toy.tensors)
    t = t.detach().to(at::kBFloat16).to(at::kFloat).requires_grad_(true);
  return toy;
}

}  // namespace

TEST(EngineAutocast, ForwardRunsInItAndNothingElse) {
  for (const bool enabled : {true, false}) {
    const Toy toy;
    auto options = toy_options({});
    options.autocast = {enabled, at::kBFloat16};
    Engine engine(options, comm::Mesh(), toy.specs(), {toy_adamw()});
    const auto product = [&] { return at::mm(toy.tensors[3], toy.tensors[4]).scalar_type(); };
    for (const bool outer : {false, true}) {
      const amp::AutocastRegion region({outer, at::kHalf}, at::kCPU);
      const auto around = outer ? at::kHalf : at::kFloat;
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(engine.pre_forward(), outer && !enabled && i == 0) << "said once";
        EXPECT_EQ(product(), enabled ? at::kBFloat16 : at::kFloat);
        engine.pre_forward();  // the engine inside its own forward
        engine.abort_forward();
        EXPECT_EQ(product(), enabled ? at::kBFloat16 : at::kFloat);
        engine.post_forward({});
        EXPECT_EQ(product(), around);
      }
      engine.pre_forward();
      engine.abort_forward();
      EXPECT_EQ(product(), around);
      region.leave();
    }
  }
  auto options = toy_options({});
  options.autocast = {true, at::kDouble};
  const Toy toy;
  EXPECT_THROW(Engine(options, comm::Mesh(), toy.specs(), {toy_adamw()}), c10::ValueError);
}

// Weights that bf16 holds: marked and unmarked runs differ in what gradients travel in only.
TEST(EngineAutocast, MarkedGradientsTravelInTheirDtype) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto others : {std::optional<at::ScalarType>{}, std::optional(at::kBFloat16)}) {
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        ToyRun run;
        run.stage = stage;
        run.persistence = 0;
        int64_t bytes[2];
        std::vector<at::Tensor> grads[2];
        for (const bool marked : {false, true}) {
          const Toy toy = exact_toy();
          Engine engine =
              marked_engine(run, toy, comm::Mesh(group), marked ? std::optional(at::kBFloat16) : std::nullopt,
                            marked ? others : std::nullopt);
          at::Tensor loss = toy_forward(engine, toy, toy_batch(rank, 0));
          group->reset_stats();
          loss.backward();
          bytes[marked] = group->stats().reduce_scatter.bytes + group->stats().all_reduce.bytes;
          for (int i = 0; i < 5; ++i)
            grads[marked].push_back(engine.states().get_full(i, Quantity::Gradient));
          EXPECT_TRUE(engine.step());
        }
        EXPECT_LT(bytes[1], (others ? 0.53 : 0.6) * static_cast<double>(bytes[0])) << "stage " << stage;
        for (int i = 0; i < 5; ++i) {
          const double gap = (grads[0][i] - grads[1][i]).norm().item<double>() / grads[0][i].norm().item<double>();
          const bool cast = others || Toy::kNames[i][0] == 'w';
          if (cast) {
            EXPECT_GT(gap, 1e-5) << "stage " << stage << " " << Toy::kNames[i];
            EXPECT_LT(gap, 5e-3) << "stage " << stage << " " << Toy::kNames[i];
            EXPECT_TRUE(grads[1][i].equal(grads[1][i].to(at::kBFloat16).to(at::kFloat)));
          } else {
            EXPECT_LT(gap, 1e-7) << "stage " << stage << " " << Toy::kNames[i];
          }
        }
      });
    }
  }
}

// Cast once for every reduction: with values that bf16 holds, micro-batches add up in fp32 as ever.
TEST(EngineAutocast, AccumulationStaysInTheGradientsDtype) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](int, const comm::GroupPtr& group) {
      ToyRun run;
      run.stage = stage;
      run.accumulation = 2;
      run.persistence = 0;
      const Toy toy;
      Engine engine = marked_engine(run, toy, comm::Mesh(group), at::kBFloat16);
      for (const float value : {2.0F, 1.0F / 64}) {  // halves: 1 + 1/128 needs 8 bits, 1 + 2^-7 ...
        engine.pre_forward();
        engine.regions().open({0, 1, 2, 3, 4});
        at::Tensor sum = toy.tensors[3].sum() * value;
        engine.post_forward({sum});
        sum.backward();
        engine.regions().close({0, 1, 2, 3, 4});
        if (value > 1) engine.step();
      }
      const at::Tensor grad = engine.states().get_full(3, Quantity::Gradient);
      EXPECT_TRUE(grad.eq(1.0F + 1.0F / 128).all().item<bool>()) << stage << " " << grad[0][0].item<float>();
      EXPECT_TRUE(engine.step());
    });
  }
}

TEST(EngineAutocast, HybridShardingCastsOnBothAxes) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_meshes(2, 2, [&](int rank, const comm::Mesh& mesh) {
      ToyRun run;
      run.stage = stage;
      std::vector<at::Tensor> grads[2];
      for (const bool marked : {false, true}) {
        const Toy toy;
        Engine engine = marked_engine(run, toy, mesh, marked ? std::optional(at::kBFloat16) : std::nullopt);
        toy_forward(engine, toy, toy_batch(rank, 0)).backward();
        for (int i = 0; i < 5; ++i)
          grads[marked].push_back(engine.states().get_full(i, Quantity::Gradient));
        EXPECT_TRUE(engine.step());
      }
      for (int i = 0; i < 5; ++i) {
        const double gap = (grads[0][i] - grads[1][i]).norm().item<double>() / grads[0][i].norm().item<double>();
        EXPECT_LT(gap, 1e-2);
        if (Toy::kNames[i][0] == 'w') {
          EXPECT_GT(gap, 1e-5) << i;
        }
      }
    });
  }
}

// Stage 3: values travel in the marked dtype to modules, and exactly to regions; masters stay exact.
TEST(EngineAutocast, GatheredValuesAreRoundedForModulesOnly) {
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    ToyRun run;
    run.stage = 3;
    run.persistence = 0;
    const Toy toy, plain;
    Engine engine = marked_engine(run, toy, comm::Mesh(group), at::kBFloat16);
    const at::Tensor& w1 = toy.tensors[3];
    const at::Tensor exact = plain.tensors[3].detach(), rounded = exact.to(at::kBFloat16).to(at::kFloat);
    ASSERT_FALSE(exact.equal(rounded));
    const int module = engine.modules().add({2, 3});
    const auto in_module = [&](const std::function<void()>& body) {
      engine.pre_forward();
      engine.modules().enter(module);
      engine.modules().note_inputs({});
      body();
      engine.modules().leave(module, {});
      engine.post_forward({});
    };
    for (int i = 0; i < 3; ++i) {  // from the second time on with prefetched units
      in_module([&] {
        EXPECT_TRUE(w1.equal(rounded));
        EXPECT_TRUE(toy.tensors[2].equal(plain.tensors[2])) << "not marked";
        engine.regions().open({3});  // a region inside: the exact values take the place
        EXPECT_TRUE(w1.equal(exact));
        engine.regions().close({3}, zero::Writes::Own);
      });
      engine.regions().open({3});
      EXPECT_TRUE(w1.equal(exact));
      in_module([&] { EXPECT_TRUE(w1.equal(exact)); });
      engine.regions().close({3}, zero::Writes::FromRank, 1);
      EXPECT_TRUE(engine.states().get_full(3, Quantity::Master).equal(exact)) << "written back unharmed";
    }
    const int64_t steady = engine.memory().buckets;
    for (int i = 0; i < 3; ++i) {
      toy_forward(engine, toy, toy_batch(rank, i)).backward();
      EXPECT_TRUE(engine.step());
    }
    const int64_t later = engine.memory().buckets;
    toy_forward(engine, toy, toy_batch(rank, 9)).backward();
    EXPECT_TRUE(engine.step());
    EXPECT_EQ(engine.memory().buckets, later);
    EXPECT_GT(later, steady);
  });
}

TEST(EngineAutocast, RefusesWhatCannotTravel) {
  const Toy toy;
  EXPECT_THROW(marked_engine({}, toy, comm::Mesh(), at::kInt), c10::ValueError);
  EXPECT_THROW(marked_engine({}, toy, comm::Mesh(), std::nullopt, at::kDouble), c10::ValueError);
}

TEST(EngineAutocast, OneRankCastsNothing) {
  ToyRun run;
  run.stage = 3;
  const Toy toy, other;
  Engine engine = marked_engine(run, toy, comm::Mesh(), at::kBFloat16),
         plain = toy_engine(run, other, comm::single_group());
  for (int i = 0; i < 2; ++i) {
    toy_forward(engine, toy, toy_batch(0, i)).backward();
    toy_forward(plain, other, toy_batch(0, i)).backward();
    engine.step();
    plain.step();
  }
  for (int i = 0; i < 5; ++i)
    EXPECT_TRUE(toy.tensors[i].equal(other.tensors[i]));
}

}  // namespace tessera::testing

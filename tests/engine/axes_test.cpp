// Engines on meshes of several axes: whose gradients are averaged, who holds which states, what all agree on.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "tessera/comm/c10d/group.h"
#include "tessera/offload/states.h"
#include "tests/comm/c10d/gloo_threads.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using comm::Axis;
using engine::Engine;
using engine::Quantity;

namespace {

at::Tensor weighted_sum(const std::vector<engine::ParamSpec>& specs, const at::Tensor& factor) {
  at::Tensor loss = at::zeros({});
  for (const engine::ParamSpec& spec : specs)
    loss = loss + (spec.tensor.to(at::kFloat) * factor).sum();
  return loss;
}

// What every rank has of the square of the norm, by rank.
struct Parts {
  std::array<double, 16> by_rank{};
  double norm() const { return std::sqrt(std::accumulate(by_rank.begin(), by_rank.end(), 0.0)); }
};

}  // namespace

// Ranks along sp and tp see the batch of their batch rank; the result is that of the batch ranks alone.
TEST(Axes, OtherAxesDoNotChangeTheResult) {
  for (const auto& sizes : std::vector<AxisSizes>{{{Axis::DpShard, 2}, {Axis::Tp, 2}},
                                                  {{Axis::DpReplicate, 2}, {Axis::Tp, 3}},
                                                  {{Axis::DpShard, 2}, {Axis::Sp, 2}},
                                                  {{Axis::DpReplicate, 2}, {Axis::Sp, 2}, {Axis::Tp, 2}}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      const ToyRun run{.stage = stage, .accumulation = 2};
      ToyReference reference(at::kFloat, 2, 2, run.clip);
      for (int step = 0; step < 3; ++step)
        reference.step();
      Parts parts;
      run_axes(sizes, [&](int rank, const comm::Mesh& mesh) {
        const Toy toy(rank == 0 ? 1 : 77);  // rank 0's values must hold
        Engine engine(toy_options(run), mesh, toy.specs(), {toy_adamw()});
        for (int micro = 0; micro < 6; ++micro) {
          toy_forward(engine, toy, toy_batch(mesh.rank(comm::kBatchAxes), micro)).backward();
          if (micro == 5) parts.by_rank[rank] = engine.norm_contribution();
          engine.step();
        }
        EXPECT_NEAR(engine.global_grad_norm().value(), reference.norm, 1e-5 * reference.norm);
        for (size_t i = 0; i < toy.tensors.size(); ++i) {
          const at::Tensor master = engine.states().get_full(static_cast<int>(i), Quantity::Master);
          EXPECT_TRUE(at::allclose(master, reference.masters()[i], 1e-5, 1e-5)) << stage << " " << i;
        }
      });
      EXPECT_NEAR(parts.norm(), reference.norm, 1e-5 * reference.norm) << stage;
    }
  }
}

// A parameter that differs along an axis keeps its own gradient there, under the factor of all others, and counts in the
// norm once for each of them.
TEST(Axes, WhatVariesAlongAnAxisIsExchangedAlongTheOthers) {
  const std::vector<std::pair<Axis, AxisSizes>> cases{
      {Axis::DpShard, {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}}},
      {Axis::DpReplicate, {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}}},
      {Axis::Tp, {{Axis::DpShard, 2}, {Axis::Tp, 2}}},
  };
  for (const auto& [axis, sizes] : cases) {
    for (int stage = 0; stage <= 3; ++stage) {
      Parts parts;
      double norm = 0;
      run_axes(sizes, [&, axis = axis](int rank, const comm::Mesh& mesh) {
        const int mine = mesh.rank(axis), batch = mesh.rank(comm::kBatchAxes), many = mesh.size(comm::kBatchAxes);
        std::vector<engine::ParamSpec> specs{{"same", at::full({40}, 1.0 + mine).requires_grad_(true), 0, "a"},
                                             {"own", at::full({24}, 5.0 + mine).requires_grad_(true), 0, "a"}};
        specs[1].varies = axis;
        optim::GroupOptions sgd;
        sgd.lr = 1;
        auto options = toy_options({.stage = stage, .clip = 0, .persistence = 0});
        options.rule = optim::Rule::Sgd;
        Engine engine(options, mesh, specs, {sgd});
        const int module = engine.modules().add({0, 1});
        if (module >= 0) engine.modules().enter(module);
        const at::Tensor loss = weighted_sum(specs, at::scalar_tensor(batch + 1.0));
        if (module >= 0) engine.modules().leave(module, {loss});
        loss.backward();
        parts.by_rank[rank] = engine.norm_contribution();
        engine.step();
        if (rank == 0) norm = *engine.global_grad_norm();
        double shared = 0, own = 0, squares = 0;
        for (int b = 0; b < many; ++b)
          shared += (b + 1.0) / many;
        std::map<int, double> by_rank;  // along `axis`
        for (int b = 0; b < many; ++b) {
          const int shards = mesh.size(Axis::DpShard);
          const int at = axis == Axis::DpShard ? b % shards : axis == Axis::DpReplicate ? b / shards : 0;
          by_rank[at] += (b + 1.0) / many;
        }
        own = axis == Axis::Tp ? by_rank[0] : by_rank[mine];
        for (int r = 0; r < mesh.size(axis); ++r)
          squares += 24 * std::pow(axis == Axis::Tp ? by_rank[0] : by_rank[r], 2);
        EXPECT_NEAR(engine.global_grad_norm().value(), std::sqrt(40 * shared * shared + squares), 1e-4) << stage;
        const auto master = [&](int i) { return engine.states().get_full(i, Quantity::Master); };
        EXPECT_TRUE(at::allclose(master(0), at::full({40}, 1.0 - shared))) << stage << master(0);
        EXPECT_TRUE(at::allclose(master(1), at::full({24}, 5.0 + mine - own))) << stage << master(1);
      });
      EXPECT_NEAR(parts.norm(), norm, 1e-9 * norm) << stage;
    }
  }
}

TEST(Axes, ASliceOfTheModelDoesNotSkipAlone) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int rank, const comm::Mesh& mesh) {
      std::vector<engine::ParamSpec> specs{{"cut", at::ones({64}).requires_grad_(true), 0, "a"},
                                           {"idle", at::ones({64}).requires_grad_(true), 0, "b"}};
      for (engine::ParamSpec& spec : specs)
        spec.varies = Axis::Tp;
      Engine engine(toy_options({.stage = stage, .bf16 = true, .persistence = 1 << 20}), mesh, specs, {toy_adamw()});
      const auto step = [&](double value) {
        auto used = specs;
        if (mesh.rank(Axis::Tp) == 0) used.pop_back();  // what another slice has a gradient for is updated here, too
        weighted_sum(used, at::scalar_tensor(value)).backward();
        return engine.step();
      };
      EXPECT_FALSE(step(rank == 3 ? INFINITY : 1.0));
      EXPECT_TRUE(step(1.0));
      EXPECT_EQ(engine.states().param_step(1), 1);
    });
  }
}

// Random bits belong to elements of the whole: columns on two ranks, and rows, are rounded as the whole is.
TEST(Axes, ACutChangesNoBit) {
  const at::Tensor weights = at::randn({8, 12}).to(at::kBFloat16), gradient = at::randn({8, 12}).to(at::kBFloat16);
  const io::TempFolder folder;
  bool away = false;  // states on a disk
  const auto train = [&](const comm::Mesh& mesh, const at::Tensor& mine, const at::Tensor& grad, shard::CutPtr cut) {
    std::vector<engine::ParamSpec> specs{{"w", mine.clone().requires_grad_(true), 0, "a"}};
    specs[0].cut = std::move(cut);
    if (specs[0].cut) specs[0].varies = Axis::Tp;
    auto options = toy_options({.clip = 0});
    options.zero.precision = mode(at::kBFloat16, amp::Master::Weight, at::kBFloat16);
    if (away) options.zero.home = offload::state_homes({.residence = shard::Residence::Nvme, .folder = folder.path()});
    Engine engine(options, mesh, specs, {toy_adamw()});
    for (int step = 0; step < 5; ++step) {
      (specs[0].tensor * grad).sum().backward();
      EXPECT_TRUE(engine.states().get_full(0, Quantity::Gradient).equal(gradient.to(at::kFloat)));
      engine.step();
    }
    return specs[0].tensor.detach().clone();
  };
  const at::Tensor whole = train(comm::Mesh(), weights, gradient, nullptr);
  for (const int dim : {0, 1}) {
    away = dim == 1;
    run_axes({{Axis::Tp, 2}}, [&](int rank, const comm::Mesh& mesh) {
      const int64_t size = weights.size(dim) / 2, begin = rank * size;
      const auto part = [&](const at::Tensor& t) { return t.narrow(dim, begin, size).contiguous(); };
      const auto cut = shard::cut_along({8, 12}, dim, {{begin, begin + size}});
      EXPECT_TRUE(train(mesh, part(weights), part(gradient), cut).equal(part(whole))) << dim;
    });
  }
}

// Values by parameter are those of the whole, in every stage: also gradients before their reduction.
TEST(Axes, ASliceIsReadAndWrittenAsItsWhole) {
  const at::Tensor whole = at::arange(24.0).view({4, 6}).to(at::kFloat);
  const std::vector<shard::Range> mine[] = {{{0, 1}, {4, 6}}, {{1, 4}}};  // two sub-parameters, unevenly cut
  for (int stage = 0; stage <= 3; ++stage) {
    run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
      const auto& ranges = mine[mesh.rank(Axis::Tp)];
      std::vector<at::Tensor> parts;
      for (const shard::Range r : ranges)
        parts.push_back(whole.narrow(1, r.begin, r.size()));
      const at::Tensor part = at::cat(parts, 1);
      std::vector<engine::ParamSpec> specs{{"w", part.clone().requires_grad_(true), 0, "a"}};
      specs[0].varies = Axis::Tp;
      specs[0].cut = shard::cut_along({4, 6}, 1, ranges);
      auto options = toy_options({.stage = stage, .accumulation = 2, .clip = 0, .persistence = 1 << 20});
      Engine engine(options, mesh, specs, {toy_adamw()});
      auto& states = engine.states();
      EXPECT_FALSE(states.get_full(0, Quantity::Gradient).defined()) << stage;
      EXPECT_TRUE(states.get_full(0, Quantity::Master).equal(whole)) << stage;
      (specs[0].tensor * part).sum().backward();
      EXPECT_TRUE(states.get_full(0, Quantity::Gradient).equal(whole / 2)) << stage;
      states.set_full(0, Quantity::Master, whole + 1);
      states.set_full(0, Quantity::State1, whole + 2);
      engine.refresh_params();
      EXPECT_TRUE(specs[0].tensor.equal(part + 1)) << stage;
      EXPECT_TRUE(states.get_full(0, Quantity::State1).equal(whole + 2)) << stage;
      EXPECT_HAS(error_of([&] { states.set_full(0, Quantity::Master, part); }), "has shape [4, 6]");
    });
  }
}

// Bit for bit, also over collectives for which a NaN is less than everything, or more, by its place.
TEST(Axes, ASliceOfAnyValuesIsReadAsItsWhole) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const at::Tensor whole = at::tensor({nan, inf, -inf, -0.0F, -nan, 1.0F, 0.0F, -1.0F});
  for (const bool crossed : {false, true}) {
    run_gloo_threads(2, [&](int rank, const TorchGroup& torch) {
      const comm::GroupPtr group = make_c10d_group(nullptr, torch, comm::C10dPath::Native);
      comm::Mesh mesh;
      mesh.set({Axis::Tp}, group);
      const int64_t begin = (rank == 1) != crossed ? 4 : 0;
      std::vector<engine::ParamSpec> specs{{"w", whole.narrow(0, begin, 4).clone().requires_grad_(true), 0, "a"}};
      specs[0].varies = Axis::Tp;
      specs[0].cut = shard::cut_along({8}, 0, {{begin, begin + 4}});
      Engine engine(toy_options({}), mesh, specs, {toy_adamw()});
      const at::Tensor found = engine.states().get_full(0, Quantity::Master);
      EXPECT_TRUE(found.view(at::kInt).equal(whole.view(at::kInt))) << found;
      group->barrier();
    });
  }
}

TEST(Axes, ModelRanksThatBuildDifferentEnginesSayWhatDiffers) {
  run_axes({{Axis::Tp, 2}}, [](int rank, const comm::Mesh& mesh) {
    std::vector<engine::ParamSpec> specs{{"w", at::ones({4 + rank}).requires_grad_(true), 0, "a"}};
    EXPECT_HAS(error_of([&] { Engine(toy_options({}), mesh, specs, {toy_adamw()}); }), "shape [5]");
    specs[0].varies = Axis::Tp;
    Engine(toy_options({}), mesh, specs, {toy_adamw()});
  });
}

}  // namespace tessera::testing

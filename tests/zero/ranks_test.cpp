// Two axes of data-parallel ranks: collectives over both, and engines that shard along one and replicate along the other.
#include "tessera/zero/ranks.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/toy.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;
using zero::Ranks;

namespace {

Engine hybrid_engine(const ToyRun& run, const Toy& toy, const comm::Mesh& mesh) {
  return Engine(toy_options(run), mesh, toy.specs(), {toy_adamw()});
}

void train_step(Engine& engine, const Toy& toy, int rank, int first_micro_step, int accumulation) {
  for (int k = 0; k < accumulation; ++k) {
    toy_forward(engine, toy, toy_batch(rank, first_micro_step + k)).backward();
    engine.step();
  }
}

const std::vector<std::pair<int, int>> kMeshes{{2, 2}, {2, 3}, {3, 1}, {1, 2}};

}  // namespace

TEST(Ranks, CollectivesReachBothAxes) {
  for (const auto& [replicas, shards] : kMeshes) {
    run_meshes(replicas, shards, [&, world = replicas * shards](int rank, const comm::Mesh& mesh) {
      const Ranks ranks(mesh);
      EXPECT_EQ(ranks.size(), world);
      EXPECT_EQ(ranks.rank(), rank);
      EXPECT_EQ(mesh.rank(comm::kBatchAxes), rank);
      const at::Tensor most = at::full({3}, rank);
      ranks.agree(most, comm::ReduceOp::Max, "most");
      EXPECT_TRUE(most.equal(at::full({3}, world - 1)));
      for (int root = 0; root < world; ++root) {
        const at::Tensor value = at::full({5}, 10.0 + rank);
        ranks.broadcast(value, root, "value");
        EXPECT_TRUE(value.equal(at::full({5}, 10.0 + root))) << root;
      }
    });
  }
}

TEST(HybridSharding, TrainsAsPlainPyTorchAndAlikeOnAllReplicas) {
  for (const auto& [replicas, shards] : kMeshes) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool bf16 : {false, true}) {
        for (const int accumulation : {1, 3}) {
          ToyRun run{.stage = stage, .bf16 = bf16, .accumulation = accumulation};
          ToyReference reference(bf16 ? at::kBFloat16 : at::kFloat, replicas * shards, accumulation, run.clip);
          for (int step = 0; step < 3; ++step)
            reference.step();
          run_meshes(replicas, shards, [&](int rank, const comm::Mesh& mesh) {
            const Toy toy(rank == 0 ? 1 : 77);  // rank 0's values must hold
            Engine engine = hybrid_engine(run, toy, mesh);
            for (int step = 0; step < 3; ++step)
              train_step(engine, toy, rank, step * accumulation, accumulation);
            // bf16: gradients are rounded once for each axis and micro-batch, the reference rounds once for both axes.
            const double tolerance = bf16 ? 0.02 : 1e-5;
            EXPECT_NEAR(engine.global_grad_norm().value(), reference.norm, tolerance * reference.norm) << stage;
            for (size_t i = 0; i < toy.tensors.size(); ++i) {
              const at::Tensor master = engine.states().get_full(static_cast<int>(i), Quantity::Master);
              EXPECT_TRUE(at::allclose(master, reference.masters()[i], tolerance, tolerance)) << stage << " " << i;
              at::Tensor first = master.clone();
              mesh.group(comm::Axis::DpReplicate)->broadcast(first, 0, "the first replica's").wait();
              EXPECT_TRUE(first.equal(master)) << "replicas differ at stage " << stage;
            }
          });
        }
      }
    }
  }
}

TEST(HybridSharding, KeepsAShareOfTheStatesAndReducesOverReplicasOncePerStep) {
  run_meshes(2, 2, [](int rank, const comm::Mesh& mesh) {
    const Toy toy;
    ToyRun run{.stage = 2, .accumulation = 3};
    Engine engine = hybrid_engine(run, toy, mesh);
    const auto whole = [&] {
      Engine alone = toy_engine({.stage = 2}, Toy(), comm::single_group());
      return alone.memory().states;
    }();
    EXPECT_NEAR(static_cast<double>(engine.memory().states), whole / 2.0, 0.2 * whole);
    const auto& across = mesh.group(comm::Axis::DpReplicate);
    across->reset_stats();
    mesh.group(comm::Axis::DpShard)->reset_stats();
    train_step(engine, toy, rank, 0, 3);
    EXPECT_EQ(across->stats().all_reduce.calls, 3) << "three units";
    EXPECT_EQ(across->stats().all_gather.calls, 1) << "the norm";
    EXPECT_EQ(mesh.group(comm::Axis::DpShard)->stats().reduce_scatter.calls, 3 * 3);
  });
}

// Reading and setting gradients between micro-batches must not count anything twice.
TEST(HybridSharding, GradientsMayBeReadAndSetBetweenMicroBatches) {
  for (const bool average : {true, false}) {
    run_meshes(2, 2, [average](int rank, const comm::Mesh& mesh) {
      const Toy toy;
      ToyRun run{.stage = 2, .accumulation = 2, .clip = 0};
      auto options = toy_options(run);
      if (!average) options.zero.gradient_factor = 1.0;
      Engine engine(options, mesh, toy.specs(), {toy_adamw()});
      const auto local = [&](int r, int micro) {
        Toy own;
        own.loss(toy_batch(r, micro)).backward();
        return own.tensors[4].grad() / 2;
      };
      const auto total = [&](int micro) {
        at::Tensor sum = at::zeros({5, 3});
        for (int r = 0; r < 4; ++r)
          sum += local(r, micro);
        return average ? sum / 4 : sum;
      };
      toy_forward(engine, toy, toy_batch(rank, 0)).backward();
      EXPECT_TRUE(at::allclose(engine.states().get_full(4, Quantity::Gradient), total(0), 1e-4, 1e-6));
      engine.states().set_full(4, Quantity::Gradient, at::full({5, 3}, 0.5));
      EXPECT_TRUE(engine.states().get_full(4, Quantity::Gradient).equal(at::full({5, 3}, 0.5)));
      engine.step();
      toy_forward(engine, toy, toy_batch(rank, 1)).backward();
      EXPECT_TRUE(at::allclose(engine.states().get_full(4, Quantity::Gradient), total(1) + 0.5, 1e-4, 1e-6));
      engine.step();
    });
  }
}

// Of widths that leave the next one unaligned; one is a view that is not contiguous, one has no elements. The words of the
// 16-bit ones are NaNs with payloads: packed bytes in the place of numbers.
TEST(Ranks, BroadcastWordsOfAnyDtype) {
  const auto of = [](int rank) {
    const at::Tensor packed = at::arange(0x7f80 + rank, 0x8040 + rank, at::kInt).to(at::kShort);
    return std::vector<at::Tensor>{at::full({3}, rank > 0, at::kBool),
                                   at::full({2, 3}, rank + 0.5, at::kDouble).t(),
                                   at::zeros({0}),
                                   packed.view(at::kBFloat16),
                                   packed.view(at::kHalf).clone(),
                                   at::full({4, 4}, rank, at::kFloat).slice(1, 0, 4, 2),
                                   at::full({}, rank + 7, at::kLong),
                                   at::full({3}, rank, at::kComplexDouble)};
  };
  run_ranks(3, [&](int rank, const comm::GroupPtr& group) {
    const auto mine = of(rank), want = of(2);
    zero::broadcast_words(Ranks(group), mine, 2, "values");
    for (size_t i = 0; i < mine.size(); ++i) {
      const bool halves = mine[i].element_size() == 2;
      const auto bits = [&](const at::Tensor& t) { return halves ? t.view(at::kShort) : t; };
      EXPECT_TRUE(bits(mine[i]).equal(bits(want[i]))) << "tensor " << i;
    }
  });
}

TEST(HybridSharding, RegionsTakeTheWritesOfAnyRank) {
  run_meshes(2, 2, [](int rank, const comm::Mesh& mesh) {
    const Toy toy;
    Engine engine = hybrid_engine({.stage = 3}, toy, mesh);
    for (int writer = 0; writer < 4; ++writer) {
      engine.regions().open({3, 4});
      toy.tensors[4].detach().fill_(rank);
      engine.regions().close({3, 4}, zero::Writes::FromRank, writer);
      EXPECT_TRUE(engine.states().get_full(4, Quantity::Master).equal(at::full({5, 3}, writer)));
    }
    engine.regions().open({4});
    EXPECT_HAS(error_of([&] { engine.regions().close({4}, zero::Writes::FromRank, 4); }), "no rank of a group of 4");
  });
}

}  // namespace tessera::testing

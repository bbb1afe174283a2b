#include "tessera/zero/regions.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/partitioned.h"

namespace tessera::testing {

using engine::Engine;
using engine::Quantity;

TEST(Regions, RegionsGiveWholeValuesAndTakeOneRanksWrites) {
  for (const bool bf16 : {false, true}) {
    on_ranks(
        3,
        [](Engine& engine, const Toy& toy, int rank) {
          const Toy original;
          const auto dtype = toy.tensors[3].scalar_type();
          const at::Tensor master = engine.states().get_full(3, Quantity::Master);
          engine.regions().open({3, 4});
          EXPECT_TRUE(toy.tensors[3].equal(original.tensors[3].to(dtype)));
          EXPECT_NE(error_of([&] { engine.regions().open({4}); }).find("overlap"), std::string::npos);
          {
            const at::NoGradGuard no_grad;
            at::Tensor(toy.tensors[4]).fill_(rank);
          }
          engine.regions().close({3, 4}, zero::Writes::FromRank, 2);
          EXPECT_TRUE(engine.states().get_full(4, Quantity::Master).equal(at::full({5, 3}, 2.0)));
          EXPECT_TRUE(engine.states().get_full(3, Quantity::Master).equal(master))
              << "untouched masters keep their bits";
          engine.regions().open({4});
          EXPECT_TRUE(toy.tensors[4].equal(at::full({5, 3}, 2.0, at::kFloat).to(dtype)));
          engine.regions().close({4});
          EXPECT_EQ(gathered(engine), "");
        },
        bf16);
  }
}

// Partitioned, resident, whole, frozen and shared ones, however they are written to.
TEST(Regions, AWritersValuesHoldOnAllRanksInEveryStage) {
  const std::vector<std::function<void(at::Tensor)>> ways{
      [](at::Tensor p) { fill(p, 1.5); }, [](at::Tensor p) { p.variable_data().fill_(1.5); },
      [](at::Tensor p) { p.set_data(at::full_like(p.detach(), 1.5)); }};
  for (int stage = 0; stage <= 3; ++stage) {
    for (const amp::PrecisionPolicy& mode : all_modes()) {
      for (const bool share : {false, true}) {
        for (size_t way = 0; way < ways.size(); ++way) {
          std::array<std::vector<at::Tensor>, 3> after;
          run_ranks(3, [&](int rank, const comm::GroupPtr& group) {
            const Toy toy;
            auto specs = toy.specs();  // "a" and "b" are below the threshold of stage 3
            for (const int frozen : {1, 4}) {
              specs[frozen].group = -1;
              at::Tensor(toy.tensors[frozen]).requires_grad_(false);
            }
            const ToyRun run{.stage = stage, .clip = 0, .precision = mode, .share = share};
            Engine engine(toy_options(run), comm::Mesh(group), specs, {toy_adamw()});
            engine.regions().open(kAll);
            if (rank == 2)
              for (const at::Tensor& tensor : toy.tensors)
                ways[way](tensor);
            engine.regions().close(kAll, zero::Writes::FromRank, 2);
            const std::string what = c10::str("stage ", stage, ", ", mode.param, " ", int(mode.master), ", shared ",
                                              share, ", way ", way, ", rank ", rank, ": ");
            const auto values = [&] {
              std::vector<at::Tensor> all;
              engine.regions().open(kAll);
              for (const at::Tensor& tensor : toy.tensors)
                all.push_back(tensor.detach().to(at::kFloat, false, /*copy=*/true));
              engine.regions().close(kAll);
              return all;
            };
            for (const at::Tensor& value : values())
              EXPECT_TRUE(value.eq(1.5).all().item<bool>()) << what << value;
            for (const int trained : {0, 2, 3})
              EXPECT_TRUE(engine.states().get_full(trained, Quantity::Master).eq(1.5).all().item<bool>()) << what;
            engine.scaling().scale(toy_forward(engine, toy, toy_batch(rank, 0))).backward();
            engine.step();
            after[rank] = values();
          });
          for (size_t i = 0; i < after[0].size(); ++i)
            EXPECT_TRUE(after[1][i].equal(after[0][i]) && after[2][i].equal(after[0][i])) << stage << ", " << i;
        }
      }
    }
  }
}

// A slice or an expert is another tensor on other ranks: there the rank in the writer's place along the other axes writes.
TEST(Regions, OfWhatDiffersAlongAxesEachKeepsItsOwn) {
  using comm::Axis;
  for (const Axis axis : {Axis::Tp, Axis::DpShard, Axis::DpReplicate}) {
    for (const int stage : {0, 1, 2, 3}) {
      run_axes({{Axis::DpReplicate, 2}, {Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int rank, const comm::Mesh& mesh) {
        std::vector<engine::ParamSpec> specs{{"own", at::zeros({8}).requires_grad_(true), 0, "a"},
                                             {"frozen", at::zeros({8}), -1, "a"},
                                             {"all", at::zeros({8}).requires_grad_(true), 0, "a"}};
        specs[0].varies = specs[1].varies = axis;
        auto options = toy_options({.stage = stage});
        Engine engine(options, mesh, specs, {toy_adamw()});
        constexpr int kWriter = 1;  // of its slice of the model: number 0 along dp_replicate, 1 along dp_shard
        engine.regions().open({0, 1, 2});
        for (const auto& spec : specs)
          spec.tensor.detach().fill_(rank);
        engine.regions().close({0, 1, 2}, zero::Writes::FromRank, kWriter);
        engine.regions().open({0, 1, 2});
        const int tp = mesh.rank(Axis::Tp), shard = mesh.rank(Axis::DpShard), replicate = mesh.rank(Axis::DpReplicate);
        const int from = axis == Axis::Tp ? 2 + tp : axis == Axis::DpShard ? 2 * shard : 4 * replicate + 2;
        for (const int own : {0, 1})
          EXPECT_TRUE(specs[own].tensor.eq(from).all().item<bool>())
              << comm::axis_name(axis) << ", stage " << stage << ", rank " << rank << ": " << specs[own].tensor;
        EXPECT_TRUE(specs[2].tensor.eq(2).all().item<bool>()) << specs[2].tensor;
        engine.regions().close({0, 1, 2});
      });
    }
  }
}

TEST(Regions, WritingWithoutAWriterIsAnErrorAndIsUndone) {
  on_ranks(2, [](Engine& engine, const Toy& toy, int) {
    const at::Tensor before = engine.states().get_full(4, Quantity::Master);
    engine.regions().open({4});
    {
      const at::NoGradGuard no_grad;
      at::Tensor(toy.tensors[4]).fill_(1);
    }
    const std::string what = error_of([&] { engine.regions().close({4}); });
    EXPECT_NE(what.find("in-place modification"), std::string::npos) << what;
    EXPECT_NE(what.find("'w2'"), std::string::npos) << what;
    EXPECT_TRUE(engine.states().get_full(4, Quantity::Master).equal(before));
  });
}

// In every stage, of parameters that are partitioned, resident, whole and frozen, for reading and for writing; what was written
// holds.
TEST(Regions, StepAndStatesThatLeaveInsideARegionAreRefused) {
  for (int stage = 0; stage <= 3; ++stage)
    for (const bool share : {false, true})
      for (const int ranks : {1, 2})
        for (const int id : {4, 0, 1})
          for (const zero::Writes writes : {zero::Writes::None, zero::Writes::Own, zero::Writes::FromRank})
            run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
              SCOPED_TRACE(c10::str("stage ", stage, ", shared ", share, ", ", ranks, " ranks, parameter ", id,
                                    ", writes ", int(writes)));
              const Toy toy;
              auto specs = toy.specs();  // "a" and "b" are below the threshold of stage 3
              specs[1].group = -1;
              at::Tensor(toy.tensors[1]).requires_grad_(false);
              Engine engine(toy_options({.stage = stage, .clip = 0, .share = share}), comm::Mesh(group), specs,
                            {toy_adamw()});
              toy_forward(engine, toy, toy_batch(rank, 0)).backward();
              engine.regions().open({id}, writes);
              if (writes != zero::Writes::None) fill(toy.tensors[id], 1.5);
              EXPECT_HAS(error_of<UsageError>([&] { engine.step(); }), "is in use (inside GatheredParameters)");
              EXPECT_EQ(engine.global_steps(), 0);
              if (stage > 0 && !share) {
                const auto leave = [&] { engine.offload_states({zero::StateKind::Weights}, shard::Residence::Host); };
                EXPECT_HAS(error_of<UsageError>(leave), "is in use (inside GatheredParameters)");
                EXPECT_FALSE(engine.states_are_away());
              }
              engine.regions().close({id}, writes, 0);
              engine.regions().open({id}, zero::Writes::None);
              EXPECT_EQ(toy.tensors[id].eq(1.5).all().item<bool>(), writes != zero::Writes::None);
              engine.regions().close({id});
              EXPECT_TRUE(engine.step());
            });
}

}  // namespace tessera::testing

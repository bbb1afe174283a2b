// Engines whose ranks share one copy of the compute parameters: the same bits as with copies of their own, whatever happens.
#include <gtest/gtest.h>

#include <thread>

#include "tessera/comm/shm/group.h"
#include "tessera/engine/engine.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/training.h"

namespace tessera::testing {

using amp::Master;
using amp::PrecisionPolicy;
using comm::GroupPtr;
using engine::Engine;
using engine::Quantity;

namespace {

constexpr auto kLong = std::chrono::minutes(2);
const std::vector<int> kAll{0, 1, 2, 3, 4};

enum class Over { Threads, Segments };

std::vector<GroupPtr> groups_of(Over over, int world) {
  return over == Over::Threads ? comm::thread_groups(world, kLong) : comm::shm_thread_groups(world, kLong);
}

// What one rank saw, in order.
using Seen = std::vector<at::Tensor>;

void see_values(Engine& engine, const Toy& toy, Seen& seen) {
  engine.regions().open(kAll, zero::Writes::None);
  for (const at::Tensor& t : toy.tensors)
    seen.push_back(t.detach().clone());
  engine.regions().close(kAll);
}

void train_step(Engine& engine, const Toy& toy, int rank, int step, int accumulation, Seen& seen) {
  for (int micro = 0; micro < accumulation; ++micro) {
    const at::Tensor loss = toy_forward(engine, toy, toy_batch(rank, step * accumulation + micro));
    seen.push_back(loss.detach().clone());
    engine.backward(loss);
    engine.step();
  }
}

// Steps with everything in between that reads and writes parameters.
Seen live_through(Engine& engine, const Toy& toy, int rank, int world, int accumulation) {
  Seen seen;
  for (int step = 0; step < 6; ++step) {
    train_step(engine, toy, rank, step, accumulation, seen);
    if (step == 1) {
      const at::NoGradGuard no_grad;
      for (int i = 0; i < 2; ++i)
        seen.push_back(toy_forward(engine, toy, toy_batch(rank, 50 + i)));
    }
    if (step == 2) {  // all write, one rank's values hold
      engine.regions().open({3, 0});
      fill(toy.tensors[3], 0.25 * (rank + 1));
      fill(toy.tensors[0], 1 + rank);
      engine.regions().close({3, 0}, zero::Writes::FromRank, world - 1);
      see_values(engine, toy, seen);
    }
    if (step == 3) {
      engine.states().set_full(1, Quantity::Master, at::full({3}, 0.3));
      const auto [begin, end] = engine.states().local_range(4);
      const at::Tensor mine = engine.states().local_view(4, Quantity::Master);
      engine.states().set_local(4, Quantity::Master,
                                at::full(mine.sizes(), 0.1 * (1 + static_cast<double>(end - begin) / 100)));
      engine.refresh_params();
      see_values(engine, toy, seen);
    }
    if (step == 4) {  // all write the same
      engine.regions().open(kAll);
      for (const at::Tensor& t : toy.tensors) {
        const at::NoGradGuard no_grad;
        at::Tensor(t).mul_(0.5);
      }
      engine.regions().close(kAll, zero::Writes::Own);
      engine.adopt_params();
    }
  }
  see_values(engine, toy, seen);
  for (const at::Tensor& state : all_states(engine))
    seen.push_back(state.clone());
  return seen;
}

using Body = std::function<Seen(Engine&, const Toy&, int rank)>;

std::vector<Seen> on_ranks(Over over, int world, const ToyRun& run, const Body& body) {
  std::vector<Seen> seen(world);
  run_threads(groups_of(over, world), [&](int rank, const GroupPtr& group) {
    const Toy toy;
    Engine engine = toy_engine(run, toy, group);
    seen[rank] = body(engine, toy, rank);
  });
  return seen;
}

void expect_same(const std::vector<Seen>& got, const std::vector<Seen>& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t r = 0; r < got.size(); ++r)
    testing::expect_same(got[r], expected[r], c10::str(what, ", rank ", r));
}

// The same with and without sharing on ranks of `groups`, made anew for each: body(rank, group, share) on all of them.
void expect_same_shared(int world, const std::string& what,
                        const std::function<Seen(int rank, const GroupPtr&, bool share)>& body) {
  std::array<std::vector<Seen>, 2> seen;
  for (const bool share : {false, true}) {
    seen[share].resize(world);
    run_threads(groups_of(Over::Segments, world),
                [&](int rank, const GroupPtr& group) { seen[share][rank] = body(rank, group, share); });
  }
  expect_same(seen[1], seen[0], what);
}

struct Case {
  std::string name;
  ToyRun run;
};

std::vector<Case> cases() {
  PrecisionPolicy copied{at::kBFloat16, at::kBFloat16, Master::Fp32};
  PrecisionPolicy alone{at::kBFloat16, at::kBFloat16, Master::Weight, at::kBFloat16};
  return {{"fp32", {}},
          {"fp32, accumulated, all partitioned", {.accumulation = 2, .clip = 0, .persistence = 0}},
          {"bf16 split", {.bf16 = true, .accumulation = 2}},
          {"bf16 with an fp32 master", {.persistence = 0, .precision = copied}},
          {"bf16 alone", {.precision = alone}},
          {"fp16", {.precision = PrecisionPolicy::fp16(), .scaler = amp::ScalerOptions::fixed(8)}}};
}

}  // namespace

class SharedEngines : public ::testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(StagesAndWorlds, SharedEngines,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(1, 2, 3)));

TEST_P(SharedEngines, HaveTheBitsOfPrivateOnes) {
  const auto [stage, world] = GetParam();
  for (Case c : cases()) {
    c.run.stage = stage;
    const Body body = [&, world = world](Engine& engine, const Toy& toy, int rank) {
      return live_through(engine, toy, rank, world, c.run.accumulation);
    };
    const auto apart = on_ranks(Over::Threads, world, c.run, body);
    c.run.share = true;
    for (const Over over : {Over::Threads, Over::Segments})
      expect_same(on_ranks(over, world, c.run, body), apart, c.name);
  }
}

TEST(SharedEngine, SkippedStepsLeaveParametersAlone) {
  for (int stage = 1; stage <= 3; ++stage) {
    ToyRun run{.stage = stage, .fp16 = true, .share = true};
    run.scaler = {.dynamic = true, .initial = 65536, .window = 100};
    on_ranks(Over::Segments, 2, run, [](Engine& engine, const Toy& toy, int rank) {
      Seen before, after;
      see_values(engine, toy, before);
      const at::Tensor bad = rank == 0 ? at::full({4, 17}, 60000.0) : toy_batch(rank, 0);
      engine.backward(toy_forward(engine, toy, bad) * 1e30);
      EXPECT_FALSE(engine.step());
      see_values(engine, toy, after);
      for (size_t i = 0; i < before.size(); ++i)
        EXPECT_TRUE(before[i].equal(after[i]));
      return Seen{};
    });
  }
}

TEST(SharedEngine, HoldsParametersOncePerHost) {
  for (int stage = 1; stage <= 3; ++stage) {
    for (const int world : {2, 3}) {
      on_ranks(Over::Segments, world, {.stage = stage, .bf16 = true, .share = true},
               [&](Engine& engine, const Toy& toy, int rank) {
                 Seen seen;
                 train_step(engine, toy, rank, 0, 1, seen);
                 const auto memory = engine.memory();
                 EXPECT_EQ(memory.params, 0);
                 EXPECT_GE(memory.shared, 2 * (1 + 3 + 17 + 85 + 15));
                 EXPECT_LE(memory.shared, 2 * 4 * 32 * world * 5);
                 if (stage == 3) {
                   EXPECT_EQ(memory.buckets - engine.memory().buckets, 0);
                   engine.regions().open(kAll, zero::Writes::None);
                   EXPECT_EQ(engine.memory().buckets, memory.buckets) << "reading copies nothing";
                   engine.regions().close(kAll);
                 }
                 return seen;
               });
    }
  }
}

// Gathers need no communication, so evaluation needs no company.
TEST(SharedEngine, RanksMayRunDifferentNumbersOfForwards) {
  for (int stage = 1; stage <= 3; ++stage) {
    on_ranks(Over::Segments, 3, {.stage = stage, .share = true}, [](Engine& engine, const Toy& toy, int rank) {
      Seen seen;
      const auto before = engine.mesh().group(comm::Axis::DpShard)->stats();
      {
        const at::NoGradGuard no_grad;
        for (int i = 0; i < 3 * rank; ++i)
          toy_forward(engine, toy, toy_batch(rank, i));
      }
      const auto& after = engine.mesh().group(comm::Axis::DpShard)->stats();
      EXPECT_EQ(after.all_gather.calls + after.barrier.calls, before.all_gather.calls + before.barrier.calls);
      train_step(engine, toy, rank, 0, 1, seen);
      return seen;
    });
  }
}

// Nobody writes while another rank reads: a slow rank reads what it would with copies of its own, a fast one waits.
TEST(SharedEngine, FastRanksWaitForSlowOnes) {
  for (int stage = 1; stage <= 3; ++stage) {
    const Body body = [&](Engine& engine, const Toy& toy, int rank) {
      Seen seen;
      const auto lag = [&](int of) {
        if (rank == of) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      };
      const auto evaluate = [&](int number) {
        const at::NoGradGuard no_grad;
        seen.push_back(toy_forward(engine, toy, toy_batch(rank, number)));
      };
      for (int step = 0; step < 4; ++step) {
        train_step(engine, toy, rank, step, 1, seen);
        const int writer = step % 2, other = 1 - writer;
        lag(other);  // late to the region, whose values are the old ones
        engine.regions().open({4});
        seen.push_back(toy.tensors[4].detach().clone());
        fill(toy.tensors[4], 0.1 * (step + 1));
        engine.regions().close({4}, zero::Writes::FromRank, writer);
        lag(other);  // late to its forward, while the other has written a region of its own
        evaluate(75);
        engine.regions().open({0});
        fill(toy.tensors[0], 0.2 * (step + 1));
        engine.regions().close({0}, zero::Writes::Own);
        lag(other);  // late to its forward, while the other refreshes what it wrote to its masters
        evaluate(76);
        fill(engine.states().local_view(1, Quantity::Master), 0.03 * (step + 1));
        lag(other);
        evaluate(76);
        engine.refresh_params();
        lag(other);  // late to its forward, while the other goes on to the setters
        evaluate(77);
        engine.states().set_full(3, Quantity::Master, at::full({17, 5}, 0.01 * (step + 1)));
        engine.refresh_params();
        evaluate(78);
        lag(writer);
        evaluate(79);
        const at::Tensor mine = engine.states().local_view(2, Quantity::Master);
        engine.states().set_local(2, Quantity::Master, at::full(mine.sizes(), 0.1 * step));
        lag(other);
        engine.refresh_params();
        evaluate(80);
        lag(writer);
      }
      return seen;
    };
    const PrecisionPolicy masters_apart{at::kBFloat16, at::kBFloat16, Master::Fp32};
    ToyRun run{.stage = stage, .persistence = 0, .precision = masters_apart};
    const auto apart = on_ranks(Over::Threads, 2, run, body);
    run.share = true;
    expect_same(on_ranks(Over::Segments, 2, run, body), apart, "stage " + std::to_string(stage));
  }
}

TEST(SharedEngine, ForeignEditsAreRefusedWhereTheyCanBeSeen) {
  on_ranks(Over::Segments, 2, {.stage = 3, .persistence = 0, .share = true}, [](Engine& engine, const Toy& toy, int) {
    engine.regions().open({4}, zero::Writes::None);
    fill(toy.tensors[4], 1);
    EXPECT_HAS(error_of([&] { engine.regions().close({4}); }), "reached the other ranks");
    engine.regions().open({4}, zero::Writes::None);
    EXPECT_HAS(error_of([&] { engine.regions().close({4}, zero::Writes::FromRank, 0); }), "for reading only");
    return Seen{};
  });
  on_ranks(Over::Segments, 2, {.stage = 2, .share = true}, [](Engine& engine, const Toy& toy, int rank) {
    Seen seen;
    engine.regions().open({4});
    engine.backward(toy_forward(engine, toy, toy_batch(rank, 0)));
    EXPECT_HAS(error_of([&] { engine.step(); }), "in use");
    EXPECT_HAS(error_of([&] { engine.refresh_params(); }), "in use");
    engine.regions().close({4}, zero::Writes::FromRank, 0);
    EXPECT_TRUE(engine.step());
    at::Tensor(toy.tensors[4]).set_data(at::ones({5, 3}));
    EXPECT_HAS(error_of([&] { engine.refresh_params(); }), "'w2' was replaced");
    return seen;
  });
}

TEST(SharedEngine, AfterTheEndRanksAreOnTheirOwn) {
  for (int stage = 1; stage <= 3; ++stage) {
    run_threads(groups_of(Over::Segments, 2), [&](int rank, const GroupPtr& group) {
      const Toy toy;
      Seen seen, before;
      {
        Engine engine = toy_engine({.stage = stage, .share = true}, toy, group);
        train_step(engine, toy, rank, 0, 1, seen);
        see_values(engine, toy, before);
        group->barrier();
        engine.destroy();
      }
      group->barrier();
      if (stage == 3) {
        EXPECT_HAS(error_of([&] { (void)toy.tensors[3].sum(); }), "its engine was destroyed");
        return;
      }
      for (const int i : kAll) {
        EXPECT_TRUE(toy.tensors[i].equal(before[i]));
        fill(toy.tensors[i], rank);
      }
      group->barrier();
      for (const int i : kAll)
        EXPECT_TRUE(toy.tensors[i].eq(rank).all().item<bool>());
    });
  }
}

// Replicas of two ranks each: one memory for each of them.
TEST(SharedEngine, ServesHybridSharding) {
  for (int stage = 1; stage <= 3; ++stage) {
    std::array<std::vector<Seen>, 2> seen;
    for (const bool share : {false, true}) {
      seen[share].resize(4);
      run_meshes(2, 2, [&](int rank, const comm::Mesh& mesh) {
        const Toy toy;
        Engine engine(toy_options({.stage = stage, .bf16 = true, .share = share}), mesh, toy.specs(), {toy_adamw()});
        for (int step = 0; step < 3; ++step)
          train_step(engine, toy, rank, step, 1, seen[share][rank]);
        engine.regions().open({3});
        fill(toy.tensors[3], 0.5 * rank);
        engine.regions().close({3}, zero::Writes::FromRank, 3);
        train_step(engine, toy, rank, 3, 1, seen[share][rank]);
        see_values(engine, toy, seen[share][rank]);
        EXPECT_EQ(engine.memory().shared > 0, share);
      });
    }
    expect_same(seen[1], seen[0], "hybrid, stage " + std::to_string(stage));
  }
}

TEST(SharedEngine, PartitionsFrozenParametersInTheSameMemory) {
  expect_same_shared(2, "frozen", [](int rank, const GroupPtr& group, bool share) {
    const Toy toy;
    auto specs = toy.specs();
    for (const int i : {2, 3}) {
      specs[i].group = -1;
      at::Tensor(toy.tensors[i]).requires_grad_(false);
    }
    Engine engine(toy_options({.stage = 3, .persistence = 0, .share = share}), comm::Mesh(group), specs, {toy_adamw()});
    EXPECT_EQ(engine.memory().params == 0, share);
    Seen seen;
    for (int step = 0; step < 3; ++step)
      train_step(engine, toy, rank, step, 1, seen);
    see_values(engine, toy, seen);
    return seen;
  });
}

// torch_autocast: values are rounded on the way, into a private bucket, and nothing travels.
TEST(SharedEngine, RoundsGatheredValuesAsTheyWouldTravel) {
  for (const int world : {2, 3}) {
    expect_same_shared(world, "autocast", [](int rank, const GroupPtr& group, bool share) {
      const Toy toy;
      auto specs = toy.specs();
      for (auto& spec : specs)
        spec.comm = at::kBFloat16;
      Engine engine(toy_options({.stage = 3, .persistence = 0, .share = share}), comm::Mesh(group), specs,
                    {toy_adamw()});
      group->reset_stats();
      Seen seen;
      {
        const at::NoGradGuard no_grad;
        seen.push_back(toy_forward(engine, toy, toy_batch(rank, 9)));
      }
      EXPECT_EQ(group->stats().all_gather.calls == 0, share);
      for (int step = 0; step < 3; ++step)
        train_step(engine, toy, rank, step, 1, seen);
      see_values(engine, toy, seen);
      return seen;
    });
  }
}

// A client's optimizer writes to the masters, in fp32 into the shared memory itself.
TEST(SharedEngine, ServesClientOptimizers) {
  for (int stage = 1; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      expect_same_shared(2, "client's optimizer", [&](int rank, const GroupPtr& group, bool share) {
        const Toy toy;
        auto options = toy_options({.stage = stage, .bf16 = bf16, .share = share});
        options.rule = optim::Rule::External;
        Engine engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()});
        Seen seen;
        int step = 0;
        const auto update = [&] {
          // One rank is slow here: the others may not read before it has written.
          if (rank == step % 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          const at::NoGradGuard no_grad;
          for (const int i : kAll)
            engine.states()
                .local_view(i, Quantity::Master)
                .sub_(engine.states().local_view(i, Quantity::Gradient), 0.1);
        };
        for (; step < 4; ++step) {
          const at::Tensor loss = toy_forward(engine, toy, toy_batch(rank, step));
          seen.push_back(loss.detach().clone());
          engine.backward(loss);
          if (rank != step % 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));  // late to the step
          engine.step(update);
          see_values(engine, toy, seen);
        }
        see_values(engine, toy, seen);
        return seen;
      });
    }
  }
}

}  // namespace tessera::testing

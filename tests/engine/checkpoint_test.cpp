// Saved, and loaded into every other way to spread and to hold a model.
#include "tessera/engine/checkpoint.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <latch>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/base/caught_warnings.h"
#include "tessera/base/error.h"
#include "tessera/comm/c10d/group.h"
#include "tessera/io/file.h"
#include "tessera/offload/states.h"
#include "tests/comm/c10d/gloo_threads.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/passing_group.h"
#include "tests/support/saved.h"

namespace tessera::testing {

using io::TempFolder;

namespace {

struct Spread {
  AxisSizes sizes;
  int stage;
};

const std::vector<Spread>& spreads() {
  using comm::Axis;
  static const std::vector<Spread> all{{{{Axis::DpShard, 1}}, 0},
                                       {{{Axis::DpShard, 3}}, 0},
                                       {{{Axis::DpShard, 2}}, 1},
                                       {{{Axis::DpShard, 3}}, 2},
                                       {{{Axis::DpReplicate, 2}, {Axis::DpShard, 2}}, 2},
                                       {{{Axis::DpShard, 2}}, 3},
                                       {{{Axis::DpReplicate, 2}, {Axis::DpShard, 2}}, 3},
                                       {{{Axis::DpShard, 2}, {Axis::Tp, 2}}, 3}};
  return all;
}

// Modes that can hold each other's values; fp16 ones have a loss scale as well.
ToyRun run_of(int stage, const amp::PrecisionPolicy& mode) {
  ToyRun run{.stage = stage, .min_unit = 0, .persistence = 4, .precision = mode};
  if (mode.param == at::kHalf) run.scaler = {.dynamic = true, .initial = 64, .window = 2};
  return run;
}

void save_trained(const std::string& dir, const Spread& spread, const amp::PrecisionPolicy& mode, Values& saved) {
  run_axes(spread.sizes, [&](int rank, const comm::Mesh& mesh) {
    const Toy toy;
    Engine engine(toy_options(run_of(spread.stage, mode)), mesh, toy.specs(), {toy_adamw()});
    train(engine, toy, mesh.rank(comm::kBatchAxes), 0, 3);
    engine.groups()[0].lr = 0.015;
    EXPECT_EQ(engine.checkpoints().save(dir, {}), "global_step3");
    Values v = values_of(engine);
    if (rank == 0) saved = v;
  });
}

}  // namespace

TEST(Checkpoint, EveryModeAndSpreadIntoEveryOther) {
  const auto modes = all_modes();
  for (size_t from = 0; from < spreads().size(); ++from) {
    for (size_t m = from % 3; m < modes.size(); m += 3) {
      const TempFolder folder;
      Values saved;
      save_trained(folder.path(), spreads()[from], modes[m], saved);
      // All modes into one other spread, which differs by mode; one mode into all.
      for (size_t to = 0; to < spreads().size(); ++to) {
        for (size_t n = 0; n < modes.size(); ++n) {
          if (n != m && to != (from + m + n) % spreads().size()) continue;
          run_axes(spreads()[to].sizes, [&](int rank, const comm::Mesh& mesh) {
            const Toy toy(99);
            Engine engine(toy_options(run_of(spreads()[to].stage, modes[n])), mesh, toy.specs(), {toy_adamw()});
            auto found = engine.checkpoints().open(folder.path(), "", {});
            ASSERT_TRUE(found);
            found->apply();
            const Values v = values_of(engine);
            if (rank != 0) return;
            const std::string what = c10::str("spread ", from, " to ", to, ", mode ", m, " to ", n);
            const at::ScalarType master = modes[n].master == amp::Master::Weight ? modes[n].param : at::kFloat;
            expect_same(v.masters, saved.masters, master, what);
            expect_same(v.first, saved.first, modes[n].state, what);
            expect_same(v.second, saved.second, modes[n].state, what);
            EXPECT_EQ(v.steps, saved.steps) << what;
            EXPECT_EQ(engine.global_steps(), 3);
            EXPECT_EQ(engine.groups()[0].lr, 0.015);
          });
        }
      }
    }
  }
}

// Where nothing is different, the run goes on as if it had not stopped; in a third of the modes with states on a disk, and
// what is partitioned of the weights.
TEST(Checkpoint, GoesOnBitForBit) {
  for (const Spread& spread : spreads()) {
    for (size_t m = 0; m < all_modes().size(); ++m) {
      const auto mode = all_modes()[m];
      for (const bool asynchronous : {m % 2 == 0}) {
        const TempFolder folder, disk;
        run_axes(spread.sizes, [&](int, const comm::Mesh& mesh) {
          const int batch = mesh.rank(comm::kBatchAxes);
          auto options = toy_options(run_of(spread.stage, mode));
          if (m % 3 == 0)
            options.zero.home = options.zero.weight_home =
                offload::state_homes({.residence = shard::Residence::Nvme, .folder = disk.path()});
          const Toy toy, other(7);
          Engine engine(options, mesh, toy.specs(), {toy_adamw()});
          train(engine, toy, batch, 0, 3);
          engine.checkpoints().save(folder.path(), {.asynchronous = asynchronous});
          train(engine, toy, batch, 3, 3);
          engine.checkpoints().wait();
          Engine resumed(options, mesh, other.specs(), {toy_adamw()});
          resumed.checkpoints().open(folder.path(), "", {})->apply();
          train(resumed, other, batch, 3, 3);
          const Values is = values_of(resumed), was = values_of(engine);
          expect_same(is.masters, was.masters, at::kFloat, "masters");
          expect_same(is.second, was.second, at::kFloat, "moments");
          EXPECT_EQ(resumed.scaling().scaler().scale(), engine.scaling().scaler().scale());
          EXPECT_EQ(resumed.global_samples(), engine.global_samples());
        });
      }
    }
  }
}

// Over the collectives of a back end itself, as on a device: they meet in the order of calls, and the thread of a save calls
// beside training.
TEST(Checkpoint, IsSavedBesideTrainingOverCollectivesWithoutTags) {
  for (const int stage : {0, 2, 3}) {
    const TempFolder folder;
    const auto body = [&](int rank, const comm::GroupPtr& group, bool saves) {
      const Toy toy, other(7);
      Engine engine = toy_engine({.stage = stage, .clip = 1e-3}, toy, group);
      std::vector<Values> were;
      for (int step = 0; step < 6; ++step) {
        if (saves) engine.checkpoints().save(folder.path(), {.tag = std::to_string(step), .asynchronous = true});
        train(engine, toy, rank, step, 1);
        were.push_back(values_of(engine));
      }
      engine.checkpoints().wait();
      if (!saves) return were;
      Engine resumed = toy_engine({.stage = stage, .clip = 1e-3}, other, group);
      for (const int step : {1, 5}) {
        resumed.checkpoints().open(folder.path(), std::to_string(step), {})->apply();
        expect_same(values_of(resumed).masters, were[step - 1].masters, at::kFloat, c10::str("step ", step));
      }
      return were;
    };
    std::vector<Values> want;
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const auto were = body(rank, group, false);
      if (rank == 0) want = were;
    });
    run_gloo_threads(2, [&](int rank, TorchGroup torch) {
      const auto were = body(rank, comm::make_c10d_group(nullptr, torch, comm::C10dPath::Native), true);
      for (size_t step = 0; step < want.size(); ++step)
        expect_same(were[step].masters, want[step].masters, at::kFloat, c10::str("stage ", stage, " step ", step));
    });
  }
}

TEST(Checkpoint, OrderOfElementsTiesAndFrozenParameters) {
  const TempFolder folder;
  const auto specs_of = [](bool reordered, bool frozen) {
    const at::Tensor image = at::arange(2 * 3 * 4 * 5, at::kFloat).view({2, 3, 4, 5});
    const at::Tensor matrix = at::arange(12, at::kFloat).view({3, 4}) + 0.5;
    std::vector<engine::ParamSpec> specs{
        {"image", reordered ? image.contiguous(at::MemoryFormat::ChannelsLast) : image.clone(), 0, "a"},
        {"matrix", reordered ? matrix.t().contiguous().t() : matrix.clone(), 0, "a"},
        {"fixed", at::arange(9, at::kLong), -1, "b"},
        {"still", at::full({70}, 3.0, at::kFloat), frozen ? -1 : 0, "b"},
        {"none", at::zeros({0, 4}), 0, "b"}};
    for (auto& spec : specs)
      if (spec.group >= 0) spec.tensor.requires_grad_(true);
    return specs;
  };
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool reordered : {false, true}) {
      run_ranks(2, [&](int, const comm::GroupPtr& group) {
        Engine engine(toy_options({.stage = stage, .persistence = 0}), comm::Mesh(group), specs_of(reordered, true),
                      {toy_adamw()});
        engine.checkpoints().save(folder.path(), {.tag = "t"});
        auto other = specs_of(!reordered, false);
        for (auto& spec : other)
          spec.tensor.detach().zero_();
        Engine second(toy_options({.stage = (stage + 2) % 4, .persistence = 0}), comm::Mesh(group), other,
                      {toy_adamw()});
        second.checkpoints().open(folder.path(), "t", {})->apply();
        const auto expected = specs_of(false, true);
        for (const int i : {0, 1, 3})
          EXPECT_TRUE(second.states().get_full(i, Quantity::Master).equal(expected[i].tensor)) << stage << i;
        EXPECT_TRUE(second.params()[2].tensor.equal(expected[2].tensor));
      });
    }
  }
}

TEST(Checkpoint, SlicesOfACutParameterAreOneTensor) {
  const at::Tensor whole = at::arange(8 * 12, at::kFloat).view({8, 12});
  const std::vector<std::vector<shard::Range>> thirds{{{0, 1}, {4, 6}}, {{1, 3}, {6, 7}}, {{3, 4}, {7, 8}}};
  const auto spec_of = [&](int64_t dim, const std::vector<shard::Range>& ranges) {
    std::vector<at::Tensor> parts;
    for (const shard::Range& r : ranges)
      parts.push_back(whole.slice(dim, r.begin, r.end));
    engine::ParamSpec spec{"w", at::cat(parts, dim).contiguous().requires_grad_(true), 0, "a"};
    spec.varies = comm::Axis::Tp;
    spec.cut = shard::cut_along({8, 12}, dim, ranges);
    return spec;
  };
  const TempFolder folder;
  run_axes({{comm::Axis::DpShard, 2}, {comm::Axis::Tp, 3}}, [&](int, const comm::Mesh& mesh) {
    Engine engine(toy_options({.stage = 2}), mesh, {spec_of(0, thirds[mesh.rank(comm::Axis::Tp)])}, {toy_adamw()});
    engine.checkpoints().save(folder.path(), {});
  });
  run_axes({{comm::Axis::DpShard, 2}, {comm::Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
    const int64_t tp = mesh.rank(comm::Axis::Tp);
    auto spec = spec_of(1, {{6 * tp, 6 * tp + 6}});
    spec.tensor.detach().zero_();
    Engine engine(toy_options({.stage = 3, .persistence = 0}), mesh, {spec}, {toy_adamw()});
    engine.checkpoints().open(folder.path(), "", {})->apply();
    EXPECT_TRUE(engine.states().get_full(0, Quantity::Master).equal(whole));
  });
  run_ranks(1, [&](int, const comm::GroupPtr& group) {
    Engine engine(toy_options({}), comm::Mesh(group), {{"w", at::zeros({8, 12}).requires_grad_(true), 0, "a"}},
                  {toy_adamw()});
    engine.checkpoints().open(folder.path(), "", {})->apply();
    EXPECT_TRUE(engine.states().get_full(0, Quantity::Master).equal(whole));
  });
}

// Whatever goes wrong in a save, the one before can be loaded, and the engine goes on.
namespace {

// An engine of one rank that has some of the parameters "a", "b" and "c".
std::unique_ptr<Engine> part_of(const std::string& names, const comm::GroupPtr& program, std::vector<int> copies,
                                double value) {
  const std::map<char, int64_t> sizes{{'a', 40}, {'b', 24}, {'c', 10}};
  std::vector<engine::ParamSpec> specs;
  for (const char name : names)
    specs.push_back({{name}, at::full({sizes.at(name)}, value).requires_grad_(true), 0, {name}});
  auto engine =
      std::make_unique<Engine>(toy_options({.stage = 1, .clip = 0}), comm::Mesh(), specs, std::vector{toy_adamw()});
  engine->checkpoints().span(program, std::move(copies));
  return engine;
}

}  // namespace

// Rank 0 has a and b, rank 1 has b (a copy) and c: one folder, that loads into one engine, and into other parts.
TEST(Checkpoint, EnginesOfOneProgramShareAFolder) {
  const TempFolder folder;
  std::map<std::string, Values> saved;
  const auto keep = [&](Engine& engine, int first) {
    const Values v = values_of(engine);
    for (size_t i = first; i < engine.params().size(); ++i)
      saved[engine.params()[i].name] = {{v.masters[i]}, {v.first[i]}, {v.second[i]}, {v.steps[i]}};
  };
  const auto check = [&](Engine& engine) {
    const Values v = values_of(engine);
    for (size_t i = 0; i < engine.params().size(); ++i) {
      const Values& was = saved.at(engine.params()[i].name);
      EXPECT_TRUE(v.masters[i].equal(was.masters[0]) && v.first[i].equal(was.first[0]) &&
                  v.second[i].equal(was.second[0]) && v.steps[i] == was.steps[0])
          << engine.params()[i].name;
    }
    EXPECT_EQ(engine.global_steps(), 2);
  };
  std::mutex mutex;
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const auto engine =
        part_of(rank == 0 ? "ab" : "bc", group, rank == 0 ? std::vector<int>{} : std::vector<int>{0}, 1);
    for (int step = 0; step < 2; ++step) {
      at::Tensor loss = at::zeros({});
      for (const engine::ParamSpec& spec : engine->params())
        loss = loss + spec.tensor.square().sum() * static_cast<double>(spec.tensor.numel());
      loss.backward();
      engine->step();
    }
    EXPECT_EQ(engine->checkpoints().save(folder.path(), {}), "global_step2");
    const std::lock_guard lock(mutex);
    keep(*engine, rank);
  });
  const auto whole = part_of("cab", comm::single_group(), {}, 5);
  whole->checkpoints().open(folder.path(), "", {})->apply();
  check(*whole);
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const auto engine = part_of(rank == 0 ? "a" : "cb", group, {}, 7);
    engine->checkpoints().open(folder.path(), "", {})->apply();
    check(*engine);
  });
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const auto engine = part_of(rank == 0 ? "a" : "b", group, {}, 7);
    EXPECT_HAS(error_of([&] { engine->checkpoints().open(folder.path(), "", {}); }), "not in the model: 'c'");
    EXPECT_TRUE(engine->checkpoints().open(folder.path(), "", {.strict = false}));
  });
}

TEST(Checkpoint, AFailedSaveLeavesTheFormerOne) {
  const TempFolder folder;
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy(5);
    Engine engine = toy_engine({.stage = 2}, toy, group);
    engine.checkpoints().save(folder.path(), {.tag = "x"});
    train(engine, toy, rank, 0, 2);
    for (const bool asynchronous : {false, true}) {
      const auto broken = [&] {
        engine::ClientPart part;
        part.tensors.push_back({"bad", "buffer", at::zeros({1}, at::kComplexHalf)});  // rank 0's file cannot be written
        engine.checkpoints().save(folder.path(), {.tag = "x", .asynchronous = asynchronous}, part);
        engine.checkpoints().wait();
      };
      EXPECT_HAS(error_of(broken), "'buffer/bad'");
    }
    auto found = engine.checkpoints().open(folder.path(), "", {});
    if (rank == 0) {
      int files = 0;
      for (const auto& entry : std::filesystem::directory_iterator(folder / "x"))
        files += entry.is_regular_file() ? 1 : 0;
      EXPECT_EQ(files, 3);  // two ranks' and the manifest
    }
    found->apply();
    EXPECT_EQ(engine.global_steps(), 0);
    train(engine, toy, rank, 0, 1);
    EXPECT_HAS(error_of([&] { engine.checkpoints().save(folder.path(), {.tag = "y", .keep_last = -1}); }), "not -1");
    engine.checkpoints().save(folder.path(), {.tag = "y", .keep_last = 1});
    EXPECT_TRUE(rank != 0 || !std::filesystem::exists(folder / "x"));
  });
}

// The scale of a run that scales begins where it would have begun, whatever a run without scaling says of its own.
TEST(Checkpoint, ARunWithoutScalingLeavesTheScaleAlone) {
  const TempFolder folder;
  run_ranks(1, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy, other(5);
    Engine plain = toy_engine({.stage = 1}, toy, group);
    train(plain, toy, rank, 0, 2);
    plain.checkpoints().save(folder.path(), {});
    const std::string path = folder / "global_step2/manifest.json";
    auto json = nlohmann::json::parse(io::read_text(path, 1 << 30));
    EXPECT_FALSE(json["run"].contains("scaler"));
    for (const bool older : {false, true}) {
      if (older) {
        json.erase("crc32c");
        json["run"]["scaler"] = {{"scale", 1.0}, {"steps", 2}, {"good_steps", 0}, {"budget", 1}, {"overridden", false}};
        std::ofstream(path) << checkpoint::sealed(json.dump());
      }
      ToyRun run{.stage = 1};
      run.scaler = {.dynamic = true, .initial = 64, .window = 100};
      Engine scaled = toy_engine(run, other, group);
      scaled.checkpoints().open(folder.path(), "", {})->apply();
      EXPECT_EQ(scaled.scaling().scaler().scale(), 64) << older;
      EXPECT_EQ(scaled.global_steps(), 2);
    }
  });
}

// Statistics of batches: each rank's own where ranks lie as they did, else the first's.
TEST(Checkpoint, BuffersOfEveryRankComeBack) {
  using comm::Axis;
  const AxisSizes there{{Axis::DpShard, 2}, {Axis::Tp, 2}};
  const TempFolder folder;
  const auto build = [](const Toy& toy, const comm::Mesh& mesh) {
    return Engine(toy_options({.stage = 1}), mesh, toy.specs(), {toy_adamw()});
  };
  run_axes(there, [&](int rank, const comm::Mesh& mesh) {
    const Toy toy;
    Engine engine = build(toy, mesh);
    engine::ClientPart part;
    part.tensors = {{"mean", "buffer", at::full({3}, rank)},
                    {"count", "buffer", at::full({}, 7, at::kLong)},
                    {"none", "buffer", at::empty({0})}};
    engine.checkpoints().save(folder.path(), {.asynchronous = true}, part);
    engine.checkpoints().wait();
  });
  for (const AxisSizes& here : std::vector<AxisSizes>{
           there, {{Axis::DpShard, 4}}, {{Axis::DpShard, 1}}, {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}}}) {
    run_axes(here, [&](int rank, const comm::Mesh& mesh) {
      const Toy toy(3);
      Engine engine = build(toy, mesh);
      auto found = engine.checkpoints().open(folder.path(), "", {});
      const at::Tensor mean = at::zeros({3}), count = at::zeros({}, at::kLong), none = at::empty({0});
      for (const auto& [buffer, value] : found->buffers({{"mean", mean}, {"count", count}, {"none", none}}))
        buffer.copy_(value);
      EXPECT_TRUE(mean.eq(here == there ? rank : 0).all().item<bool>()) << rank;
      EXPECT_EQ(count.item<int64_t>(), 7);
      EXPECT_HAS(error_of([&] { found->buffers({{"mean", mean}, {"none", none}}); }), "not in the model: 'count'");
    });
  }
}

namespace {

// Gathers of a label wait until they may.
class Gate final : public PassingGroup {
 public:
  Gate(comm::GroupPtr inner, std::string label, std::shared_future<void> open)
      : PassingGroup(std::move(inner)), label_(std::move(label)), open_(std::move(open)) {}

 protected:
  void before(std::string_view call, comm::Label label) override {
    if (call == "all_gather" && label == label_) open_.wait();
  }
  comm::GroupPtr around(comm::GroupPtr sibling) const override {
    return std::make_shared<Gate>(std::move(sibling), label_, open_);
  }

 private:
  std::string label_;
  std::shared_future<void> open_;
};

}  // namespace

// An engine that goes amid a save in the background waits for nobody: rank 1's files are written only once both engines are gone.
TEST(Checkpoint, AnEngineThatGoesDoesNotWaitForItsSave) {
  const TempFolder folder;
  std::promise<void> gone;
  const std::shared_future<void> open = gone.get_future();
  std::latch both(2);
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy;
    CaughtWarnings warnings(/*shows=*/false);
    {
      auto engine = toy_engine({.stage = 1}, toy, std::make_shared<Gate>(group, "files of a checkpoint", open));
      engine.checkpoints().save(folder.path(), {.tag = "x", .asynchronous = true});
    }
    const auto& texts = warnings.texts();
    ASSERT_EQ(texts.size(), 1U);
    EXPECT_HAS(texts[0], "wait_for_checkpoint()");
    both.arrive_and_wait();
    if (rank == 0) gone.set_value();
  });
  const std::string latest = (std::filesystem::path(folder.path()) / "latest").string();
  for (int i = 0; i < 600 && !std::filesystem::exists(latest); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(io::read_text(latest, 100), "x");
  run_ranks(1, [&](int, const comm::GroupPtr& group) {
    const Toy toy(3);
    auto engine = toy_engine({.stage = 1}, toy, group);
    EXPECT_TRUE(engine.checkpoints().open(folder.path(), "", {}));
  });
}

}  // namespace tessera::testing

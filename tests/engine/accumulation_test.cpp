// Runs saved between the micro-steps of one optimizer step.
#include "tessera/engine/accumulation.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tessera/io/crc32c.h"
#include "tessera/io/file.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/numbers.h"
#include "tests/support/saved.h"

namespace tessera::testing {

using comm::Axis;
using io::TempFolder;

namespace {

constexpr int kMicro = 4;  // of a step

struct Begun {
  AxisSizes sizes;
  int stage;
  bool held;  // the last backward before the save is inside no_sync
};

const std::vector<Begun>& begun() {
  static const std::vector<Begun> all = [] {
    std::vector<Begun> list;
    for (int stage = 0; stage <= 3; ++stage)
      for (const bool held : {false, true})
        for (const AxisSizes& sizes : std::vector<AxisSizes>{{{Axis::DpShard, 1}},
                                                             {{Axis::DpShard, 3}},
                                                             {{Axis::DpReplicate, 2}, {Axis::DpShard, 2}},
                                                             {{Axis::DpShard, 2}, {Axis::Tp, 2}}})
          list.push_back({sizes, stage, held});
    return list;
  }();
  return all;
}

engine::Options options_of(int stage, const amp::PrecisionPolicy& mode) {
  ToyRun run{.stage = stage, .accumulation = kMicro, .min_unit = 0, .persistence = 4, .precision = mode};
  if (mode.param == at::kHalf) run.scaler = {.dynamic = true, .initial = 64, .window = 2};
  return toy_options(run);
}

// One step and the first three micro-steps of the next.
void begin(Engine& engine, const Toy& toy, int batch, bool held) {
  train(engine, toy, batch, 0, kMicro + 2);
  if (held) engine.begin_no_sync();
  engine.scaling().scale(toy_forward(engine, toy, toy_batch(batch, kMicro + 2))).backward();
  if (held) engine.end_no_sync();
  engine.step();
}

}  // namespace

TEST(Accumulation, GoesOnBitForBitWhereNothingIsDifferent) {
  const auto modes = all_modes();
  for (size_t i = 0; i < begun().size(); ++i) {
    const Begun& c = begun()[i];
    const auto& mode = modes[i % modes.size()];
    const TempFolder folder;
    run_axes(c.sizes, [&](int, const comm::Mesh& mesh) {
      const int batch = mesh.rank(comm::kBatchAxes);
      const Toy toy, other(7);
      Engine engine(options_of(c.stage, mode), mesh, toy.specs(), {toy_adamw()});
      begin(engine, toy, batch, c.held);
      engine.checkpoints().save(folder.path(), {.asynchronous = i % 2 == 0});
      Engine resumed(options_of(c.stage, mode), mesh, other.specs(), {toy_adamw()});
      // What it had begun itself is forgotten.
      resumed.scaling().scale(toy_forward(resumed, other, toy_batch(batch, 99))).backward();
      engine.checkpoints().wait();
      resumed.checkpoints().open(folder.path(), "", {})->apply();
      EXPECT_EQ(resumed.micro_steps(), kMicro + 3);
      for (Engine* e : {&engine, &resumed})
        train(*e, e == &engine ? toy : other, batch, kMicro + 3, kMicro + 1);
      const Values is = values_of(resumed), was = values_of(engine);
      const std::string what = c10::str("case ", i, ", masters");
      expect_same(is.masters, was.masters, at::kFloat, what);
      expect_same(is.second, was.second, at::kFloat, what);
      EXPECT_EQ(resumed.global_steps(), engine.global_steps());
      EXPECT_EQ(resumed.global_grad_norm(), engine.global_grad_norm()) << what;
    });
  }
}

TEST(Accumulation, HasTheSameGradientElsewhere) {
  const auto mode = amp::PrecisionPolicy::fp32();
  const auto gradients = [](Engine& engine) {
    engine.grad_norm();  // reduces
    std::vector<at::Tensor> all;
    for (int id = 0; id < static_cast<int>(engine.params().size()); ++id)
      all.push_back(engine.states().get_full(id, Quantity::Gradient));
    return all;
  };
  for (size_t from = 0; from < begun().size(); ++from) {
    const TempFolder folder;
    std::vector<at::Tensor> expected;
    run_axes(begun()[from].sizes, [&](int rank, const comm::Mesh& mesh) {
      const Toy toy;
      Engine engine(options_of(begun()[from].stage, mode), mesh, toy.specs(), {toy_adamw()});
      begin(engine, toy, mesh.rank(comm::kBatchAxes), begun()[from].held);
      engine.checkpoints().save(folder.path(), {});
      const auto found = gradients(engine);
      if (rank == 0) expected = found;
    });
    for (size_t to = from % 3; to < begun().size(); to += 3) {
      if (begun()[to].held) continue;
      run_axes(begun()[to].sizes, [&](int, const comm::Mesh& mesh) {
        const Toy toy(9);
        Engine engine(options_of(begun()[to].stage, mode), mesh, toy.specs(), {toy_adamw()});
        engine.checkpoints().open(folder.path(), "", {})->apply();
        const auto found = gradients(engine);
        for (size_t i = 0; i < found.size(); ++i)
          EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-5, 1e-7)) << from << " to " << to << ", " << i;
        engine.step();
        EXPECT_EQ(engine.global_steps(), 2);
      });
    }
  }
}

// Note [Another number of micro-batches] in engine/restore.h.
TEST(Accumulation, ABoundaryIsWhereItBelongsUnderAnotherNumber) {
  struct Row {
    int there, begun, here;
    int left;  // micro-batches until the first update
    bool goes_on;
  };
  const std::vector<Row> rows{{2, 0, 4, 4, false}, {3, 0, 2, 2, false}, {4, 0, 3, 3, false}, {3, 0, 1, 1, false},
                              {2, 1, 4, 2, true},  {4, 2, 2, 1, true},  {6, 2, 3, 2, true},  {2, 1, 2, 1, true},
                              {2, 1, 3, 3, false}, {4, 1, 2, 2, false}, {2, 1, 1, 1, false}};
  for (int stage = 0; stage <= 3; ++stage) {
    for (const Row& row : rows) {
      const TempFolder folder;
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        const Toy toy, other(7);
        const auto build = [&](const Toy& of, int accumulation) {
          return toy_engine({.stage = stage, .accumulation = accumulation, .persistence = 4}, of, group);
        };
        Engine engine = build(toy, row.there);
        train(engine, toy, rank, 0, 3 * row.there + row.begun);
        engine.checkpoints().save(folder.path(), {});
        Engine resumed = build(other, row.here);
        auto found = resumed.checkpoints().open(folder.path(), "", {});
        const std::string what = c10::str("stage ", stage, ", ", row.begun, " of ", row.there, " into ", row.here);
        EXPECT_EQ(found->accumulation_begins_anew(), row.begun > 0 && !row.goes_on) << what;
        found->apply();
        EXPECT_EQ(resumed.has_gradients(), row.goes_on) << what;
        EXPECT_EQ(resumed.micro_steps(), 3 * row.here + row.here - row.left) << what;
        for (const int until : {row.left, row.here, row.here}) {
          const int64_t before = resumed.global_steps();
          for (int micro = 1; micro <= until; ++micro) {
            EXPECT_EQ(resumed.is_gradient_accumulation_boundary(), micro == until) << what << ", " << micro;
            train(resumed, other, rank, 100 + micro, 1);
            EXPECT_EQ(resumed.global_steps() - before, micro == until ? 1 : 0) << what << ", " << micro;
          }
        }
      });
    }
  }
}

// The batch of an update is the same: two ranks with two micro-batches, one rank with four.
TEST(Accumulation, TheUpdateIsThatOfTheRunThatWentOn) {
  for (int stage = 0; stage <= 3; ++stage) {
    const TempFolder folder;
    std::vector<at::Tensor> expected;
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const Toy toy;
      Engine engine = toy_engine({.stage = stage, .accumulation = 2}, toy, group);
      train(engine, toy, rank, 0, 3);
      engine.checkpoints().save(folder.path(), {});
      train(engine, toy, rank, 3, 1);
      if (const auto masters = values_of(engine).masters; rank == 0) expected = masters;
    });
    const Toy toy(7);
    Engine alone = toy_engine({.stage = stage, .accumulation = 4}, toy, comm::single_group());
    alone.checkpoints().open(folder.path(), "", {})->apply();
    train(alone, toy, 0, 3, 1);
    train(alone, toy, 1, 3, 1);
    EXPECT_EQ(alone.global_steps(), 2);
    const auto masters = values_of(alone).masters;
    for (size_t i = 0; i < masters.size(); ++i)
      EXPECT_TRUE(at::allclose(masters[i], expected[i], 1e-4, 1e-6)) << stage << ", " << i;
  }
}

TEST(Accumulation, ABackwardThatNoStepHasCountedGoesOnUnderTheSameNumberOnly) {
  const TempFolder folder;
  const Toy toy;
  Engine engine = toy_engine({.stage = 1, .accumulation = 2}, toy, comm::single_group());
  train(engine, toy, 0, 0, 1);
  toy_forward(engine, toy, toy_batch(0, 1)).backward();
  engine.checkpoints().save(folder.path(), {});
  engine.destroy();
  for (const int here : {2, 4}) {
    Engine resumed = toy_engine({.stage = 1, .accumulation = here}, toy, comm::single_group());
    resumed.checkpoints().open(folder.path(), "", {})->apply();
    EXPECT_EQ(resumed.has_gradients(), here == 2);
    EXPECT_EQ(resumed.is_gradient_accumulation_boundary(), here == 2);
    resumed.destroy();
  }
}

// A count of its own, not a remainder of all micro-steps: what came before with another number, or with boundaries that the
// user set, shifts nothing.
TEST(Accumulation, ANumberThatChangesBeginsAtABoundary) {
  const Toy toy;
  Engine engine = toy_engine({.stage = 1, .accumulation = 2}, toy, comm::single_group());
  const auto until_update = [&] {
    int count = 0;
    for (const int64_t before = engine.global_steps(); engine.global_steps() == before; ++count)
      train(engine, toy, 0, count, 1);
    return count;
  };
  for (int step = 0; step < 3; ++step)
    EXPECT_EQ(until_update(), 2);
  engine.set_gradient_accumulation_steps(4);
  EXPECT_EQ(until_update(), 4);
  train(engine, toy, 0, 0, 2);
  engine.set_gradient_accumulation_boundary(true);
  EXPECT_EQ(until_update(), 1);
  EXPECT_EQ(until_update(), 4) << "after a short one";
  train(engine, toy, 0, 0, 3);
  engine.set_gradient_accumulation_steps(2);
  EXPECT_EQ(until_update(), 1) << "more have begun than are needed";
  EXPECT_EQ(until_update(), 2);
}

// Slices and experts have no gradient for another spread: the accumulation begins anew.
// In what the manifest says of the run; loaded by as many ranks, and by others.
TEST(Accumulation, NoNumberOfTheRunWraps) {
  using Json = nlohmann::ordered_json;
  const TempFolder folder;
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy;
    Engine engine = toy_engine({.stage = 2, .accumulation = kMicro}, toy, group);
    begin(engine, toy, rank, false);
    engine.checkpoints().save(folder.path(), {.tag = "t"});
  });
  const std::string path = folder / "t/manifest.json";
  const std::string text = io::read_text(path, 1 << 30);
  Json good = Json::parse(text);
  good.erase("crc32c");
  good["run"]["client"]["schedule_steps"] = 1;
  for (const int accumulation : {kMicro, 6})
    run_ranks(1, [&](int, const comm::GroupPtr& group) {
      const Toy toy;
      Engine engine = toy_engine({.stage = 2, .accumulation = accumulation}, toy, group);
      const auto before = engine.micro_steps();
      each_wrong_number(good["run"], [&](const std::string& pointer, const Json& run) {
        Json json = good;
        json["run"] = run;
        std::ofstream(path) << checkpoint::sealed(json.dump());
        try {
          engine.checkpoints().open(folder.path(), "t", {});
        } catch (const IoError& error) {
          EXPECT_HAS(std::string(error.what()), folder.path());
        }
        EXPECT_EQ(engine.micro_steps(), before) << pointer;
      });
      std::ofstream(path) << text;
      engine.checkpoints().open(folder.path(), "t", {})->apply();
    });
  // What each rank has said of its own gradients.
  for (const std::string& said : std::vector<std::string>{"{", "[{\"name\": 3}]", "[3]"}) {
    const std::string id = good["id"], name = id + "-bad.bin";
    std::ofstream(folder / ("t/" + name)) << said;
    good["blobs"]["accumulation-0"] = {
        {"name", name}, {"bytes", said.size()}, {"crc32c", io::crc32c(said.data(), said.size())}};
    std::ofstream(path) << checkpoint::sealed(good.dump());
    run_ranks(2, [&](int, const comm::GroupPtr& group) {
      const Toy toy;
      Engine engine = toy_engine({.stage = 2, .accumulation = kMicro}, toy, group);
      EXPECT_HAS((message_of<IoError>([&] { engine.checkpoints().open(folder.path(), "t", {}); })), "accumulation-0");
    });
  }
}

TEST(Accumulation, BeginsAnewWhereItCannotGoOn) {
  const TempFolder folder;
  const auto build = [](const comm::Mesh& mesh, int stage) {
    const int64_t tp = mesh.rank(Axis::Tp), rows = 12 / mesh.size(Axis::Tp);
    engine::ParamSpec spec{"w", at::arange(rows * 3, at::kFloat).view({rows, 3}).requires_grad_(true), 0, "a"};
    spec.varies = Axis::Tp;
    spec.cut = shard::cut_along({12, 3}, 0, {{tp * rows, (tp + 1) * rows}});
    return Engine(toy_options({.stage = stage, .accumulation = 2}), mesh, {spec}, {toy_adamw()});
  };
  const auto backward = [](Engine& engine) {
    engine.pre_forward();
    const at::Tensor loss = engine.params()[0].tensor.square().sum();
    engine.post_forward({loss});
    loss.backward();
    engine.step();
  };
  for (const int stage : {1, 2}) {
    run_axes({{Axis::DpShard, 2}, {Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
      Engine engine = build(mesh, stage);
      backward(engine);
      engine.checkpoints().save(folder.path(), {});
      Engine same = build(mesh, stage);
      same.checkpoints().open(folder.path(), "", {})->apply();
      EXPECT_EQ(same.grad_norm(), engine.grad_norm());
      EXPECT_EQ(same.micro_steps(), 1);
    });
    run_axes({{Axis::DpShard, 2}, {Axis::Tp, 3}}, [&](int, const comm::Mesh& mesh) {
      Engine engine = build(mesh, stage);
      auto found = engine.checkpoints().open(folder.path(), "", {});
      EXPECT_TRUE(found->accumulation_begins_anew());
      found->apply();
      EXPECT_FALSE(engine.has_gradients());
      EXPECT_EQ(engine.micro_steps(), 0);
    });
  }
}

}  // namespace tessera::testing

// Stages that are engines: results of the whole model, whatever the cut; checkpoints that go from any number of stages to any
// other.
#include "tessera/nn/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <functional>
#include <mutex>

#include "tessera/base/error.h"
#include "tests/io/temp_folder.h"
#include "tests/nn/stages.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace tessera::nn {

using testing::Case;
using testing::data_of;
using testing::error_of;
using testing::layers;
using testing::Weights;

namespace {

constexpr int kSteps = 3;

// Weights of all stages after so many steps; what every rank sees is compared on the way.
testing::Trained train_stages(const Case& c, int steps, int first = 0, const std::string& from = "",
                              const std::string& to = "",
                              const std::function<void(torch::nn::Module&, int)>& before = {}) {
  testing::Trained result;
  std::mutex mutex;
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
    EXPECT_TRUE(from.empty() || engine.load_checkpoint(from));
    EXPECT_EQ(engine.core().global_steps(), first);
    std::vector<double> losses;
    for (int step = first; step < first + steps; ++step) {
      if (before) before(engine.module(), step);
      losses.push_back(engine.train_batch(data_of(c, parts, step)));
    }
    EXPECT_EQ(engine.core().micro_steps(), (first + steps) * c.micro_batches);
    if (steps > 0) {
      EXPECT_EQ(engine.max_live_activations(),
                pipeline::live_bound(c.schedule, {c.stages, c.micro_batches, c.chunks}, parts.part));
    }
    if (!to.empty()) engine.save_checkpoint(to);
    const std::scoped_lock lock(mutex);
    if (result.losses.empty()) result.losses = losses;
    EXPECT_EQ(losses, result.losses) << "the same on all ranks";
    result.norm = engine.core().global_grad_norm().value_or(0);
    Weights weights = testing::weights_of(engine.module());
    for (const auto& [name, value] : c.tp == 1 ? weights : Weights())
      EXPECT_TRUE(!result.weights.contains(name) || at::equal(value, result.weights[name])) << "a copy of " << name;
    result.weights.merge(weights);
  });
  return result;
}

void expect_same(const Weights& got, const Weights& expected, const std::string& where) {
  ASSERT_EQ(got.size(), expected.size()) << where;
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(at::equal(got.at(name), value)) << where << ": " << name;
}

}  // namespace

TEST(Pipeline, WhatWasMovedFromSaysSo) {
  const Case c;
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
    Pipeline other = std::move(engine);
    EXPECT_GT(other.train_batch(data_of(c, parts, 0)), 0);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { engine.train_batch(data_of(c, parts, 0)); }, [&] { engine.eval_batch(data_of(c, parts, 0), 1); },
             [&] { engine.save_checkpoint("nowhere"); }, [&] { static_cast<void>(engine.load_checkpoint("nowhere")); },
             [&] { engine.max_live_activations(); }, [&] { engine.module(); }, [&] { engine.core(); },
             [&] { engine.stage(); }, [&] { engine.stages(); }, [&] { engine.is_first_stage(); },
             [&] { engine.is_last_stage(); }, [&] { engine.destroy(); }})  // NOLINT
      EXPECT_HAS(error_of<UsageError>(call), "[engine] this object was moved from");
  });
}

TEST(Pipeline, TrainsAsTheWholeModelBitForBit) {
  std::vector<Case> cases;
  for (const int stages : {2, 4})
    for (const char* schedule : {"1f1b", "gpipe"})
      for (const int zero : {0, 1, 2})
        cases.push_back({.stages = stages, .schedule = schedule, .zero = zero});
  cases.push_back({.stages = 1});
  cases.push_back({.stages = 3, .micro_batches = 1});
  for (const int zero : {0, 1, 2})
    cases.push_back({.ranks = 2, .zero = zero, .micro_batches = 5});
  cases.push_back({.chunks = 2, .schedule = "interleaved", .zero = 1});
  cases.push_back({.chunks = 3});
  cases.push_back({.ranks = 2, .chunks = 2, .schedule = "gpipe", .zero = 2, .micro_batches = 3});
  for (const char* dtype : {"bf16", "fp16"}) {
    cases.push_back({.zero = 1, .dtype = dtype});
    cases.push_back({.ranks = 2, .zero = 2, .dtype = dtype});
    cases.push_back({.zero = 1, .dtype = dtype, .interval = 2});
  }
  for (const int zero : {0, 1, 2}) {  // a stage with nothing to train
    cases.push_back({.ranks = 2, .zero = zero, .list = [](auto&) { return testing::frozen_layers(0, 5); }});
    cases.push_back({.ranks = 2, .zero = zero, .list = [](auto&) { return testing::frozen_layers(5, 10); }});
    cases.push_back({.ranks = 2, .zero = zero, .list = [](auto&) { return testing::functions_last(); }});
  }
  cases.push_back({.stages = 1, .interval = 3});
  cases.push_back({.ranks = 2, .zero = 2, .interval = 1});
  cases.push_back({.chunks = 2, .schedule = "interleaved", .interval = 2});
  testing::add_optimizers(cases);
  for (const Case& c : cases) {
    const auto expected = testing::train_whole(c, kSteps), got = train_stages(c, kSteps);
    EXPECT_EQ(got.losses, expected.losses) << c.name();
    expect_same(got.weights, expected.weights, c.name());
  }
}

// The norm adds up in another order.
TEST(Pipeline, ClipsByTheNormOfAllStages) {
  for (const Case& c :
       {Case{.stages = 4, .zero = 1, .clip = 0.1}, Case{.ranks = 2, .zero = 2, .dtype = "fp16", .clip = 0.1}}) {
    const auto expected = testing::train_whole(c, kSteps), got = train_stages(c, kSteps);
    EXPECT_GT(expected.norm, 0.1);
    EXPECT_NEAR(got.norm, expected.norm, 1e-3 * expected.norm);
    for (const auto& [name, value] : expected.weights)
      EXPECT_TRUE(at::allclose(got.weights.at(name), value, 1e-3, c.dtype == "fp32" ? 1e-6 : 1e-2)) << name;
  }
}

namespace {

// Sums are added up in another order.
void expect_close(const Case& c) {
  const auto expected = testing::train_whole(c, kSteps), got = train_stages(c, kSteps);
  const double tolerance = c.dtype == "fp32" ? 1e-5 : 2e-2;
  for (size_t step = 0; step < expected.losses.size(); ++step)
    EXPECT_NEAR(got.losses[step], expected.losses[step], 10 * tolerance * expected.losses[step]) << c.name();
  EXPECT_NEAR(got.norm, expected.norm, 10 * tolerance * expected.norm) << c.name();
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (const auto& [name, value] : expected.weights) {
    if (got.weights.at(name).sizes() != value.sizes()) continue;  // a slice
    EXPECT_TRUE(at::allclose(got.weights.at(name).to(at::kFloat), value.to(at::kFloat), tolerance, tolerance))
        << c.name() << ": " << name;
  }
}

Case tied(Case c) {
  c.list = [](const comm::Mesh&) { return testing::tied_layers(); };
  return c;
}

}  // namespace

TEST(Pipeline, TiedWeightsAreOne) {
  const std::string units = R"("tessera": {"min_unit_elements": 0},)";
  for (const Case& c : {Case{.stages = 1}, Case{}, Case{.stages = 4, .zero = 1, .clip = 0.1},
                        Case{.ranks = 2, .zero = 2, .more = units}, Case{.ranks = 3, .zero = 2, .clip = 0.1},
                        Case{.stages = 3, .ranks = 2, .zero = 1, .dtype = "bf16"}, Case{.chunks = 2, .dtype = "fp16"},
                        Case{.chunks = 3, .schedule = "interleaved", .zero = 1, .interval = 1}})
    expect_close(tied(c));
  for (Case c : {Case{}, Case{.ranks = 2, .zero = 2, .clip = 0.1}}) {
    c.list = [](const comm::Mesh&) { return testing::tied_layers(/*idle=*/true); };
    expect_close(c);
  }
}

// Frozen when they are built and for the first step, thawed for the second and the third, frozen for the fourth.
TEST(Pipeline, TiedWeightsAreOneThatMayBeFrozenAndThawed) {
  const auto thaw = [](torch::nn::Module& module, int step) {
    for (const auto& param : module.named_parameters())
      if (param.key().starts_with("tied_modules.")) at::Tensor(param.value()).requires_grad_(step == 1 || step == 2);
  };
  constexpr int kLong = 4;
  const std::string units = R"("tessera": {"min_unit_elements": 0},)";
  for (const Case& each : {Case{.zero = 1, .clip = 0.1}, Case{.ranks = 2, .zero = 2, .clip = 0.1, .more = units},
                           Case{.zero = 1, .own = true}, Case{.ranks = 2, .zero = 2, .more = units, .own = true}}) {
    Case c = each;
    c.list = [](const comm::Mesh&) { return testing::tied_layers(/*idle=*/false, /*frozen=*/true); };
    const auto expected = testing::train_whole(c, kLong, thaw), got = train_stages(c, kLong, 0, "", "", thaw);
    EXPECT_NEAR(got.norm, expected.norm, 1e-4 * expected.norm);
    for (const auto& [name, value] : expected.weights)
      EXPECT_TRUE(at::allclose(got.weights.at(name), value, 1e-5, 1e-5)) << c.name() << ": " << name;
  }
  const Case c{.zero = 1};
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(testing::tied_layers(/*idle=*/false, /*frozen=*/true), c.config(), parts, c.options());
    thaw(engine.module(), engine.is_first_stage() ? 0 : 1);
    for (int i = 0; i < 2; ++i)
      EXPECT_HAS(error_of([&] { engine.train_batch(data_of(c, parts, 0)); }), "trained parameters on two stages");
    thaw(engine.module(), 1);
    EXPECT_GT(engine.train_batch(data_of(c, parts, 0)), 0) << "the engine goes on";
  });
}

TEST(Pipeline, StagesMayBeCutByTensorParallelism) {
  for (Case c :
       {Case{.tp = 2}, Case{.ranks = 2, .zero = 2, .clip = 0.1, .tp = 2}, Case{.zero = 1, .interval = 1, .tp = 2}}) {
    c.list = testing::cut_layers;
    expect_close(c);
  }
}

TEST(Pipeline, StagesSkipAStepTogether) {
  const Case c{.zero = 1, .dtype = "fp16"};
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(layers(), c.config(), parts, c.options());
    const Weights before = testing::weights_of(engine.module());
    engine.train_batch([&](int64_t micro) {
      MicroBatch batch = testing::batch_of(0, 0, micro, c.type());
      if (micro == 2) batch.labels[0].fill_(std::numeric_limits<float>::infinity());  // the last stage alone sees it
      return batch;
    });
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_EQ(engine.core().skipped_steps(), 1);
    expect_same(testing::weights_of(engine.module()), before, "skipped");
    EXPECT_EQ(engine.loss_scale(), 256) << "hysteresis";
    engine.train_batch(data_of(c, parts, 1));
    EXPECT_TRUE(engine.was_step_applied());
  });
}

TEST(Pipeline, OneStageLogs) {
  std::mutex mutex;
  std::vector<std::string> lines;
  const Case c{.ranks = 2, .zero = 1, .more = R"("data_parallel_size": 4, "steps_per_print": 1, )"};
  ::testing::internal::CaptureStderr();
  testing::run_stages(c, [&](const comm::Parts& parts) {
    const testing::KeptWarnings kept;
    Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
    engine.train_batch(data_of(c, parts, 0));
    const std::scoped_lock lock(mutex);
    lines.insert(lines.end(), kept.lines.begin(), kept.lines.end());
  });
  const std::string shown = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(shown.starts_with("[tessera] step=1, skipped=0, lr=[0.01], mom=[(0.9, 0.999)], loss=")) << shown;
  EXPECT_EQ(std::ranges::count(shown, '\n'), 1);
  ASSERT_EQ(lines.size(), 1u) << ::testing::PrintToString(lines);
  EXPECT_HAS(lines[0], "data_parallel_size: has no effect");
}

// Of all stages: the loss that train_batch() returns, their common norm.
TEST(Pipeline, MetricsAreThoseOfTheWholeModel) {
  for (const int stages : {1, 2}) {
    const Case c{.stages = stages, .ranks = 2, .zero = 1};
    std::map<std::string, std::vector<double>> seen;
    std::vector<double> losses, norms;
    testing::run_stages(c, [&](const comm::Parts& parts) {
      Pipeline engine(c.list(parts.mesh), c.config(), parts, c.options());
      engine.on_metric([&](const std::string& name, double value, int64_t) { seen[name].push_back(value); });
      for (int step = 0; step < 2; ++step) {
        const double loss = engine.train_batch(data_of(c, parts, step));
        if (parts.everyone->rank() != 0) continue;
        losses.push_back(loss);
        norms.push_back(engine.core().global_grad_norm().value_or(-1));
      }
    });
    EXPECT_EQ(seen["Train/Samples/train_loss"], losses);
    EXPECT_EQ(seen["Train/Samples/grad_norm"], norms);
    EXPECT_EQ(seen["Train/Samples/lr"], std::vector<double>({0.01, 0.01}));
  }
}

TEST(Pipeline, EvaluatesWithoutGradients) {
  const Case c{.chunks = 2};
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(layers(), c.config(), parts, c.options());
    const Weights before = testing::weights_of(engine.module());
    const auto part = engine.module().children().front();
    part->eval();
    const Evaluation found = engine.eval_batch(data_of(c, parts, 0), 6);
    EXPECT_EQ(found.outputs.size(), engine.is_last_stage() ? 6u : 0u);
    double sum = 0;
    for (size_t micro = 0; micro < found.outputs.size(); ++micro) {
      EXPECT_FALSE(found.outputs[micro][0].requires_grad());
      sum += testing::loss_of(found.outputs[micro], data_of(c, parts, 0)(static_cast<int64_t>(micro)).labels)
                 .item<double>();
    }
    EXPECT_NEAR(found.loss, engine.is_last_stage() ? sum / 6 : found.loss, 1e-6);
    expect_same(testing::weights_of(engine.module()), before, "evaluation");
    EXPECT_TRUE(engine.module().is_training());
    EXPECT_FALSE(part->is_training());
    part->train();
    PipelineOptions without = c.options();
    without.loss = nullptr;
    Pipeline plain(layers(), c.config(), parts, without);
    const Evaluation outputs = plain.eval_batch(data_of(c, parts, 0), 6);
    EXPECT_TRUE(std::isnan(outputs.loss));
    EXPECT_EQ(outputs.outputs.size(), found.outputs.size());
  });
}

TEST(Pipeline, CheckpointsGoFromAnyNumberOfStagesToAnyOther) {
  const std::vector<Case> cases{
      {.stages = 2, .zero = 1}, {.stages = 1}, {.stages = 4, .zero = 2}, {.stages = 2, .chunks = 2}, {.stages = 2}};
  const auto expected = testing::train_whole(cases[0], static_cast<int>(cases.size()));
  const io::TempFolder folder, ties;
  std::string from;
  testing::Trained last;
  std::vector<double> losses;
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string to = folder / c10::str("after_", i);
    last = train_stages(cases[i], 1, static_cast<int>(i), from, to);
    losses.push_back(last.losses[0]);
    from = to;
  }
  EXPECT_EQ(losses, expected.losses);
  expect_same(last.weights, expected.weights, "five cuts");
  const auto first = train_stages(tied({.stages = 3, .zero = 1}), 1, 0, "", ties.path());
  expect_same(train_stages(tied({.ranks = 2}), 0, 1, ties.path()).weights, first.weights, "tied");
}

namespace {

comm::Parts stages_of_processes(const Case& c) {
  return environment_stages(c.config(), c.stages);
}

}  // namespace

TEST(Pipeline, RanksAsProcesses) {
  const Case c{.ranks = 2, .zero = 1};
  if (!testing::is_rank()) {
    for (const auto& result : testing::run_processes(4))
      EXPECT_EQ(result.exit_code, 0) << result.output;
    return;
  }
  const auto expected = testing::train_whole(c, kSteps);
  const comm::Parts parts = stages_of_processes(c);
  Pipeline engine(layers(), c.config(), parts, c.options());
  for (int step = 0; step < kSteps; ++step)
    EXPECT_EQ(engine.train_batch(data_of(c, parts, step)), expected.losses[step]);
  for (const auto& [name, value] : testing::weights_of(engine.module()))
    EXPECT_TRUE(at::equal(value, expected.weights.at(name))) << name;
}

// Gloo does not say by itself what has been taken.
TEST(Pipeline, WhatIsUnderWayOverGlooIsBoundedByTheSchedule) {
  constexpr int kMicroBatches = 12;
  const Case c{.stages = 3, .micro_batches = kMicroBatches};
  if (!testing::is_rank()) {
    for (const auto& result : testing::run_processes(3, {{"TESSERA_TRANSPORT", "gloo"}}))
      EXPECT_EQ(result.exit_code, 0) << result.output;
    return;
  }
  comm::Parts parts = stages_of_processes(c);
  int64_t most = 0;  // activations and gradients that were sent and are still held, by whomever, at one time
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> sent;
  parts.p2p = std::make_shared<testing::Watched>(parts.p2p, [&](const at::Tensor& tensor, int) {
    if (tensor.is_floating_point()) sent.emplace_back(tensor.storage().getWeakStorageImpl());
    most = std::max<int64_t>(most, std::ranges::count_if(sent, [](const auto& each) { return !each.expired(); }));
  });
  Pipeline engine(layers(), c.config(), parts, c.options());
  engine.train_batch(data_of(c, parts, 0));
  // Activations that wait for their backward, and gradients that stages before are yet to take.
  EXPECT_LE(most, pipeline::live_bound(c.schedule, {c.stages, kMicroBatches, 1}, parts.part) + c.stages + 1);
  most = 0;
  engine.eval_batch(data_of(c, parts, 0), kMicroBatches);
  EXPECT_LE(most, pipeline::kAhead + 1);
}

TEST(Pipeline, AProcessThatDiesIsNamedOnAllStages) {
  const Case c{.stages = 3};
  if (!testing::is_rank()) {
    const auto results = testing::run_processes(3);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(results[rank].exit_code, rank == 2 ? -SIGKILL : 0) << results[rank].output;
      EXPECT_LT(results[rank].seconds, 60);
    }
    return;
  }
  const comm::Parts parts = stages_of_processes(c);
  Layers list = layers();
  const bool dies = parts.part == 2;
  list.add([dies](const at::Tensor& x) { return dies && raise(SIGKILL) != 0 ? at::Tensor() : x; });
  Pipeline engine(list, c.config(), parts, c.options());
  const auto text = error_of([&] { engine.train_batch(data_of(c, parts, 0)); });
  EXPECT_HAS(text, "rank 2");
}

}  // namespace tessera::nn

#include "tessera/nn/session.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>

#include "tessera/io/file.h"
#include "tessera/nn/engine.h"
#include "tessera/nn/parallel.h"
#include "tessera/nn/together.h"
#include "tests/io/temp_folder.h"
#include "tests/nn/session_steps.h"
#include "tests/nn/stages.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::nn {
namespace {

using testing::pass;
using testing::train_step;

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// All that has no effect, and progress, whatever axis the ranks are on.
TEST(Session, OneRankLogs) {
  using comm::Axis;
  const auto tells = [](const testing::AxisSizes& axes, int stage, int steps) {
    const auto config = Config::from_json(c10::str(R"({"train_micro_batch_size_per_gpu": 1, "steps_per_print": 2,
      "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "data_parallel_size": 4, "log_level": "info",
      "zero_optimization": {"leaf_module": {"name_suffixes": ["nowhere"]}, "stage": )",
                                                   stage, "}}"));
    std::mutex mutex;
    std::vector<std::string> lines;
    testing::run_axes(axes, [&](int, const comm::Mesh& mesh) {
      const testing::KeptWarnings kept;
      Session s(torch::nn::Linear(2, 2).ptr(), config, mesh);
      s.expect(10);
      for (int step = 0; step < steps; ++step)
        train_step(s);
      const std::scoped_lock lock(mutex);
      lines.insert(lines.end(), kept.lines.begin(), kept.lines.end());
    });
    return lines;
  };
  for (const testing::AxisSizes& axes :
       std::vector<testing::AxisSizes>{{{Axis::DpShard, 2}},
                                       {{Axis::Sp, 2}},
                                       {{Axis::Tp, 2}},
                                       {{Axis::DpShard, 2}, {Axis::Sp, 2}, {Axis::Tp, 2}}}) {
    ::testing::internal::CaptureStderr();
    const bool cuts_sequence = axes.contains(Axis::Sp);  // and nothing exchanges its parts
    EXPECT_EQ(tells(axes, 1, 5).size(), cuts_sequence ? 3u : 2u);
    const std::string shown = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::ranges::count(shown, '\n'), 2) << shown;
    for (const int step : {2, 4})
      EXPECT_HAS(shown, c10::str("[tessera] step=", step, "/10, skipped=0, lr=[0.5], mom=[0.0], samples/s="));
    EXPECT_HAS(shown, ", memory=0.0 MB, left=0:00:0");
    const auto lines = tells(axes, 3, 0);
    ASSERT_EQ(lines.size(), 3u) << ::testing::PrintToString(lines);
    EXPECT_HAS(lines[0], "data_parallel_size: has no effect in this version");
    EXPECT_HAS(lines[1], "log_level (any): has no effect in C++; warnings are torch's");
    EXPECT_HAS(lines[2], "nowhere");
  }
}

// Over samples, after each update: the first rank's, whatever the ranks are.
TEST(Session, NumbersOfAnUpdateGoToWritersAndCallbacks) {
  for (const int ranks : {1, 2}) {
    const io::TempFolder folder;
    std::vector<std::tuple<std::string, double, int64_t>> seen;
    testing::run_ranks(ranks, [&](int rank, const comm::GroupPtr& group) {
      const std::string section = R"({"enabled": true, "output_path": ")" + folder.path() + R"(", "job_name": "job"})";
      auto engine =
          initialize(torch::nn::Linear(2, 1),
                     Config::from_json(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
          "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "csv_monitor": )" +
                                       section + R"(, "tensorboard": )" + section + "}"),
                     comm::Mesh(group));
      engine.add_writer(io::json_metrics(folder / "lines"));
      engine.expect(0, /*tokens_per_sample=*/7);
      engine.on_metric([&](const std::string& name, double value, int64_t step) {
        EXPECT_EQ(rank, 0);
        seen.emplace_back(name, value, step);
      });
      for (int i = 0; i < 4; ++i) {
        engine.backward(engine.forward(at::zeros({1, 2})).sum() * 0 + i + 10 * rank);
        engine.step();
      }
      engine.write_metrics({{"mine", 7, 3}});
    });
    const int64_t batch = 6L * ranks;
    using Point = std::pair<std::string, int64_t>;
    std::map<Point, double> found;
    std::set<std::string> names;
    for (const auto& [name, value, step] : seen) {
      names.insert(name);
      found[{name.substr(name.rfind('/') + 1), step}] = value;
    }
    const std::map<Point, double> expected{{{"train_loss", batch}, 0.5},
                                           {{"lr", batch}, 0.5},
                                           {{"global_steps", batch}, 1},
                                           {{"memory_formula_params", batch}, 3 * 4},
                                           {{"memory_formula_grads", batch}, 3 * 4},
                                           {{"grad_norm", batch}, 0},
                                           {{"skipped_steps", batch}, 0},
                                           {{"train_loss", 2 * batch}, 2.5},
                                           {{"lr", 2 * batch}, 0.5},
                                           {{"grad_norm", 2 * batch}, 0},
                                           {{"skipped_steps", 2 * batch}, 0},
                                           {{"mine", 3}, 7}};
    for (const auto& [point, value] : expected)
      EXPECT_EQ(found.at(point), value) << point.first << ", " << ranks;
    const double samples = found.at({"samples_per_second", 2 * batch});
    EXPECT_GT(samples, 0);
    EXPECT_NEAR(found.at({"tokens_per_second", 2 * batch}) / samples, 7, 1e-6);
    EXPECT_FALSE(found.contains({"samples_per_second", batch})) << "since when is not known";
    for (const char* phase : {"forward", "backward", "step", "other"})
      EXPECT_GT(found.at({std::string("phase_ms_") + phase, 2 * batch}), 0) << phase;
    EXPECT_EQ(found.contains({"comm_bytes_all_reduce", batch}), ranks > 1);
    EXPECT_TRUE(ranks == 1 ||
                found.at({"comm_bytes_all_reduce", batch}) == found.at({"comm_bytes_all_reduce", 2 * batch}));
    EXPECT_GE(found.at({"memory_bytes_params", batch}), 3 * 4);
    EXPECT_EQ(text_of(folder / "job/Train_Samples_train_loss.csv"),
              c10::str("step,train_loss\r\n", batch, ",0.5\r\n", 2 * batch, ",2.5\r\n"));
    EXPECT_EQ(text_of(folder / "job/mine.csv"), "step,mine\r\n3,7.0\r\n");
    const std::string lines = text_of(folder / "lines");
    EXPECT_EQ(std::ranges::count(lines, '\n'), static_cast<int64_t>(seen.size()));
    std::vector<std::filesystem::path> files(std::filesystem::directory_iterator(folder / "job"), {});
    EXPECT_EQ(files.size(), names.size() + 1);  // a file of CSV for each, one of events
  }
}

// More of them while numbers are given are called from the next ones on.
TEST(Session, AFunctionThatGetsNumbersMayAddOthers) {
  auto engine = initialize(torch::nn::Linear(2, 1),
                           Config::from_json(R"({"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD"}})"));
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.on_metric({}); }),
             "[engine.on_metric] the function is empty");
  EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.add_writer(nullptr); }),
             "[engine.add_writer] there is no");
  int outer = 0, inner = 0;
  engine.on_metric([&, first = true](const std::string&, double, int64_t) mutable {
    ++outer;
    for (int i = 0; i < 50 && first; ++i)
      engine.on_metric([&](const std::string&, double, int64_t) { ++inner; });
    first = false;
  });
  engine.write_metrics({{"a", 1, 1}});
  EXPECT_EQ(outer, 1);
  EXPECT_EQ(inner, 0);
  engine.write_metrics({{"a", 2, 2}});
  EXPECT_EQ(outer, 2);
  EXPECT_EQ(inner, 50);
}

// Those of the construction, too, for who comes later; once each.
TEST(Session, WarningsGoToWriters) {
  const io::TempFolder folder;
  const std::string config = R"({"train_micro_batch_size_per_gpu": 3, "data_parallel_size": 4,
      "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "tessera": {"json_lines": ")" +
                             (folder / "a") + "\"}}";
  auto engine = initialize(torch::nn::Linear(2, 1), Config::from_json(config));
  engine.add_writer(io::json_metrics(folder / "b"));
  engine.backward(engine.forward(at::zeros({1, 2})).sum());
  engine.step();
  engine.count_empty_steps();
  engine.step();  // without a backward
  for (const char* name : {"a", "b"}) {
    const std::string lines = text_of(folder / name);
    EXPECT_TRUE(lines.starts_with(R"({"warning": "data_parallel_size: has no effect)")) << lines;
    const size_t second = lines.find(R"({"warning": "[engine.step])");
    ASSERT_NE(second, std::string::npos) << lines;
    EXPECT_LT(lines.find(R"("step": 3)"), second);
    EXPECT_EQ(lines.find("{\"warning", second + 1), std::string::npos) << lines;
  }
}

TEST(Session, AnUpdateFromFewerBackwardsThanStepsIsWarnedOfOnce) {
  for (int stage = 0; stage <= 3; ++stage) {
    const testing::KeptWarnings kept;
    auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
                                        "optimizer": {"type": "SGD"}})");
    config.zero_optimization.stage = stage;
    auto engine = initialize(torch::nn::Linear(2, 1), config);
    for (int update = 0; update < 2; ++update) {
      EXPECT_EQ(kept.lines.size(), update);
      engine.backward(engine.forward(at::zeros({1, 2})).sum());
      EXPECT_FALSE(engine.step());
      EXPECT_TRUE(engine.step());
    }
    ASSERT_EQ(kept.lines.size(), 1U);
    EXPECT_HAS(kept.lines[0], "no backward has reached this engine since the last step()");
  }
}

// With offload at stages 1 and 2, as in DeepSpeed.
TEST(Session, AnUnusedParameterIsAnErrorWhereTheConfigurationSaysSo) {
  struct Half : torch::nn::Module {
    torch::nn::Linear used{register_module("used", torch::nn::Linear(2, 1))};
    torch::nn::Linear idle{register_module("idle", torch::nn::Linear(2, 1))};
    at::Tensor forward(const at::Tensor& x) { return used(x); }
  };
  for (int stage = 0; stage <= 3; ++stage) {
    const auto config = Config::from_json(c10::str(
        R"({"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"ignore_unused_parameters": false, "offload_optimizer": {"device": ")",
        stage == 0 ? "none" : "cpu", R"("}, "stage": )", stage, "}}"));
    auto engine = initialize(std::make_shared<Half>(), config);
    engine.backward(engine.forward(at::ones({1, 2})).sum());
    const std::string text = testing::error_of<UsageError>([&] { engine.step(); });
    EXPECT_EQ(text.empty(), stage == 0 || stage == 3) << stage << text;
    if (!text.empty()) {
      EXPECT_HAS(text, "idle.weight, idle.bias: no part in the loss, which zero_optimization.ignore_unused_parameters");
    }
  }
}

TEST(Session, ADiskThatIsFullForNumbersIsWarnedOfOnceAndTheRunGoesOn) {
  const io::TempFolder folder;
  auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD"}})");
  config.tessera.json_lines = "/dev/full";
  auto engine = initialize(torch::nn::Linear(2, 1), config);
  engine.add_writer(io::json_metrics(folder / "lines"));
  const testing::KeptWarnings kept;
  for (int step = 0; step < 3; ++step)
    train_step(engine);
  EXPECT_EQ(engine.global_steps(), 3);
  ASSERT_EQ(kept.lines.size(), 1U) << ::testing::PrintToString(kept.lines);
  EXPECT_HAS(kept.lines[0], "[metrics] cannot write '/dev/full': No space left on device; the run goes on");
  const std::string lines = text_of(folder / "lines");
  EXPECT_HAS(lines, R"({"warning": "[metrics] cannot write '/dev/full')");
  EXPECT_HAS(lines, R"("step": 9)");
}

TEST(Session, ALossThatIsNotFiniteIsWarnedOfOnce) {
  for (const bool watched : {false, true}) {
    const io::TempFolder folder;
    auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD"}})");
    if (watched) config.tessera.json_lines = folder / "lines";
    auto engine = initialize(torch::nn::Linear(2, 1), config);
    const testing::KeptWarnings kept;
    for (const double factor : {1.0, -std::nan(""), std::nan("")}) {
      engine.backward(engine.forward(at::zeros({1, 2})).sum() * factor);
      engine.step();
    }
    ASSERT_EQ(kept.lines.size(), watched ? 1U : 0U) << ::testing::PrintToString(kept.lines);
    if (!watched) continue;
    EXPECT_HAS(kept.lines[0], "[engine.step] the loss of step 2 is nan");
    EXPECT_HAS(text_of(folder / "lines"), R"({"warning": "[engine.step] the loss of step 2 is nan)");
  }
}

TEST(Session, WarningsOfALoadGoToWriters) {
  const io::TempFolder folder;
  auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD"}})");
  config.tessera.json_lines = folder / "lines";
  for (const bool loads : {false, true}) {
    config.gradient_accumulation_steps = loads ? 3 : 2;
    auto engine = initialize(torch::nn::Linear(2, 1), config);
    EXPECT_EQ(loads, loads && engine.load_checkpoint(folder / "run"));
    EXPECT_EQ(text_of(folder / "lines").find("was saved inside an accumulation") != std::string::npos, loads);
    pass(engine);
    engine.save_checkpoint(folder / "run");
  }
}

TEST(Session, MemoryPrintsItselfBesideTheFormula) {
  for (const int stage : {0, 3})
    testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
      const std::string config = R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {}},
          "zero_optimization": {"stage3_param_persistence_threshold": 0, "stage": )" +
                                 std::to_string(stage) + "}}";
      const auto layer = torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false));
      auto engine = initialize(layer, Config::from_json(config), comm::Mesh(group));
      engine.backward(engine.forward(at::zeros({1, 1024})).sum());
      engine.step();
      const engine::MemoryUse memory = engine.memory();
      EXPECT_EQ(memory.params, memory.formula.params);
      EXPECT_EQ(memory.master + memory.states, memory.formula.states);
      const std::string text = c10::str(memory);
      EXPECT_HAS(text, "memory of this rank (MiB)                 held     formula\nparams        ");
      EXPECT_HAS(text, stage == 0 ? "masters and states                        8.00        8.00\n"
                                  : "masters and states                        4.00        4.00\n");
    });
}

TEST(Session, OperationsOverTime) {
  testing::run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    const torch::nn::Sequential model(torch::nn::Linear(2, 3), torch::nn::Linear(3, 4), torch::nn::Tanh(),
                                      ColumnLinear(torch::nn::LinearOptions(4, 2), parallel::Region{group}));
    EXPECT_EQ(linear_flops(*model), 6 * (6 + 12 + 8));
    auto engine = initialize(
        torch::nn::Linear(2, 3),
        Config::from_json(R"({"train_micro_batch_size_per_gpu": 5, "optimizer": {"type": "SGD"}})"), comm::Mesh(group));
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.count_flops(0); }), "must be > 0, got 0");
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { engine.count_flops({}, 0); }), "must be > 0, got 0");
    std::map<std::string, double> seen;
    engine.on_metric([&](const std::string& name, double value, int64_t) { seen[name] = value; });
    const auto begin = std::chrono::steady_clock::now();
    engine.count_flops(1e9, 1e12);
    engine.forward(at::ones({5, 2})).sum().backward();
    engine.step();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (rank != 0) return;
    EXPECT_GE(seen["Train/Samples/tflops"], 5e9 / seconds * 1e-12);  // of one of two ranks
    EXPECT_NEAR(seen["Train/Samples/mfu"], seen["Train/Samples/tflops"], 1e-9);
  });
}

// Over an accumulation; without anything to count a warning says so.
TEST(Session, OperationsOfAStepAreCounted) {
  for (const bool empty : {false, true}) {
    const auto config = Config::from_json(R"({"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD"}})");
    auto engine = initialize(
        empty ? torch::nn::Sequential(torch::nn::Embedding(3, 2)) : torch::nn::Sequential(torch::nn::Linear(2, 3)),
        config, comm::Mesh());
    std::map<std::string, double> seen;
    engine.on_metric([&](const std::string& name, double value, int64_t) { seen[name] = value; });
    const testing::KeptWarnings kept;
    engine.count_flops({}, 1e12);
    for (int micro_step = 0; micro_step < 6; ++micro_step) {
      engine.forward(empty ? at::zeros({5}, at::kLong) : at::ones({5, 2})).sum().backward();
      engine.step();
    }
    ASSERT_EQ(kept.lines.size(), empty ? 1U : 0U);
    if (empty) {
      EXPECT_HAS(kept.lines[0], "[engine.count_flops] no products of matrices");
      continue;
    }
    EXPECT_NEAR(seen["Train/Samples/tflops"] * 1e12 / seen["Train/Samples/samples_per_second"], 3 * 2 * 6, 1e-9);
    EXPECT_NEAR(seen["Train/Samples/mfu"], seen["Train/Samples/tflops"], 1e-12);
  }
}

TEST(Session, LinesOfTimesMemoryAndCollectives) {
  const auto trained = [](const std::string& more) {
    ::testing::internal::CaptureStderr();
    testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
      auto engine = initialize(torch::nn::Linear(2, 1),
                               Config::from_json(R"({"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true},
          "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 2})" +
                                                 more + "}"),
                               comm::Mesh(group));
      double scale = 0, times = 0;
      if (engine.rank() == 0)
        engine.on_metric([&](const std::string& name, double value, int64_t) {
          if (name == "Train/Samples/loss_scale") scale = value;
          if (name.starts_with("Train/Samples/elapsed_time_ms_")) ++times;
        });
      engine.backward(engine.forward(at::ones({1, 2}, at::kHalf)).sum());
      engine.step();
      EXPECT_EQ(scale, engine.rank() == 0 ? 65536 : 0);
      const bool timed = !more.empty();
      EXPECT_EQ(times, timed && engine.rank() == 0 ? 5 : 0);
      EXPECT_EQ(engine.step_seconds().has_value(), timed);
      if (!timed) {
        EXPECT_HAS(testing::error_of<UsageError>([&] { engine.comm_summary(); }), "set comms_logger.enabled");
        return;
      }
      EXPECT_GT((*engine.step_seconds())[static_cast<size_t>(Phase::Step)], 0);
      const auto rows = engine.comm_summary(/*stragglers=*/true);
      const auto calls = [&](const char* op) {
        return std::ranges::count_if(rows, [&](const engine::CallRow& row) { return row.total.op == op; });
      };
      EXPECT_GT(calls("reduce_scatter"), 0);
      EXPECT_EQ(calls("all_gather"), 0);  // prof_ops
      EXPECT_TRUE(rows[0].straggler_seconds >= 0.0);
      EXPECT_TRUE(engine::text_of(rows).starts_with("            op  bytes  ranks  calls"));
    });
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(trained(""), "");
  const std::string lines = trained(R"(, "wall_clock_breakdown": true, "memory_breakdown": true,
      "comms_logger": {"enabled": true, "verbose": true, "prof_all": false, "prof_ops": ["reduce_scatter"]})");
  EXPECT_HAS(lines, "[tessera] time (ms) | forward: ");
  EXPECT_HAS(lines, " | of these gather: ");
  EXPECT_HAS(lines, "[tessera] comm op: reduce_scatter | time (ms): ");
  EXPECT_HAS(lines, "[tessera] memory (MB) | params: 0.0 | ");
}

}  // namespace
}  // namespace tessera::nn

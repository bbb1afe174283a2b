// Operations by module, with an engine and without one.
#include "tessera/nn/flops_profiler.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>

#include "tessera/base/error.h"
#include "tessera/nn/engine.h"
#include "tessera/nn/hooked.h"
#include "tests/io/temp_folder.h"
#include "tests/nn/stages.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

// Of its own: other files have such names, too.
namespace tessera::nn::flops_profiler_tests {
namespace {

using testing::error_of;

constexpr int64_t kBatch = 3, kLength = 5, kWide = 8, kWords = 11, kHeads = 2;

struct AttentionImpl : torch::nn::Module {
  AttentionImpl()
      : qkv(register_module("qkv", torch::nn::Linear(kWide, 3 * kWide))),
        out(register_module("out", torch::nn::Linear(kWide, kWide))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(x).view({x.size(0), x.size(1), 3, kHeads, kWide / kHeads}).permute({2, 0, 3, 1, 4});
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    return out(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), kWide}));
  }
  torch::nn::Linear qkv, out;
};
TORCH_MODULE(Attention);

struct BlockImpl : Hooked<BlockImpl, at::Tensor(at::Tensor)> {
  BlockImpl()
      : attend(register_module("attend", unit(Attention()))),
        mlp(register_module("mlp", torch::nn::Sequential(torch::nn::Linear(kWide, 4 * kWide), torch::nn::GELU(),
                                                         torch::nn::Linear(4 * kWide, kWide)))) {}
  at::Tensor forward_impl(const at::Tensor& x) {
    if (fails) throw std::runtime_error("no luck");
    const at::Tensor y = x + attend(x);
    return y + mlp->forward(y);
  }
  UnitOf<Attention> attend;
  torch::nn::Sequential mlp;
  bool fails = false;
};
TORCH_MODULE(Block);

// Of a weight that another module has, too.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const at::Tensor& of) : weight(register_parameter("weight", of)) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Head);

struct Gpt : torch::nn::Module {
  Gpt()
      : tokens(register_module("tokens", torch::nn::Embedding(kWords, kWide))),
        blocks(register_module("blocks", torch::nn::ModuleList(Block(), Block()))),
        head(register_module("head", Head(tokens->weight))) {}
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = tokens(ids);
    for (const auto& block : *blocks)
      x = block->as<BlockImpl>()->forward(x);
    return head(x);
  }
  torch::nn::Embedding tokens;
  torch::nn::ModuleList blocks;
  Head head;
};

at::Tensor ids() {
  return at::arange(kBatch * kLength).remainder(kWords).view({kBatch, kLength});
}

std::map<std::string, int64_t> operations_of(const FlopsProfiler& profiler) {
  std::map<std::string, int64_t> found;
  for (const engine::ProfileRow& row : profiler.rows())
    found[row.name] = row.operations;
  return found;
}

// A multiplication and an addition are two.
std::map<std::string, int64_t> by_formula() {
  constexpr int64_t tokens = kBatch * kLength, square = 2 * tokens * kWide * kWide;
  constexpr int64_t products = 2 * 2 * kBatch * kLength * kLength * kWide;  // of queries and keys, of these and values
  std::map<std::string, int64_t> rows;
  for (const char* block : {"blocks.0", "blocks.1"}) {
    const std::string at = block;
    rows[at + ".attend.qkv"] = 3 * square;
    rows[at + ".attend.out"] = square;
    rows[at + ".attend"] = 4 * square + products;
    rows[at + ".mlp.0"] = rows[at + ".mlp.2"] = 4 * square;
    rows[at + ".mlp.1"] = 0;
    rows[at + ".mlp"] = 8 * square;
    rows[at] = 12 * square + products;
  }
  rows["blocks"] = 2 * rows["blocks.0"];
  rows["tokens"] = 0;
  rows["head"] = 2 * tokens * kWide * kWords;
  rows[""] = rows["blocks"] + rows["head"];
  return rows;
}

std::set<std::string> timed_in(const FlopsProfiler& profiler) {
  std::set<std::string> names;
  for (const engine::ProfileRow& row : profiler.rows())
    if (row.timed) names.insert(row.name);
  return names;
}

const std::set<std::string> kUnits{"blocks.0", "blocks.0.attend", "blocks.1", "blocks.1.attend"};

TEST(FlopsProfiler, AModelWithoutAnEngine) {
  const auto model = std::make_shared<Gpt>();
  FlopsProfiler profiler(model, /*recompute=*/0.5);
  EXPECT_TRUE(profiler.rows().empty());
  auto counting = profiler.start();
  EXPECT_HAS(error_of<UsageError>([&] { static_cast<void>(profiler.start()); }), "[flops_profiler] it counts already");
  const at::Tensor loss = model->forward(ids()).sum();
  loss.backward();  // no forward
  counting.stop();
  model->forward(ids());
  EXPECT_EQ(operations_of(profiler), by_formula());
  EXPECT_EQ(timed_in(profiler), kUnits);
  EXPECT_EQ(profiler.profile().operations(), by_formula()[""] * 3 / 2);
  for (const engine::ProfileRow& row : profiler.rows())
    EXPECT_EQ(row.seconds > 0, row.timed) << row.name;
  EXPECT_TRUE(model->blocks->ptr<BlockImpl>(0)->scope().profiles.empty());
  {
    const auto again = profiler.start();
    model->forward(ids());
    model->forward(ids());
  }
  EXPECT_EQ(operations_of(profiler)[""], 2 * by_formula()[""]);
  EXPECT_HAS(error_of<c10::ValueError>([] { FlopsProfiler(std::shared_ptr<torch::nn::Module>()); }), "model is null");
  EXPECT_HAS(error_of<c10::ValueError>([] { FlopsProfiler(torch::nn::Linear(nullptr)); }), "model is null");
}

// tests/python/test_flops.py has the same of the same model.
TEST(FlopsProfiler, TheTableIsThatOfPython) {
  const auto model = std::make_shared<Gpt>();
  FlopsProfiler profiler(model);
  {
    const auto counting = profiler.start();
    model->forward(ids());
  }
  const std::string text =
      std::regex_replace(profiler.text({.depth = 2, .top_modules = 2}), std::regex(", [0-9.]+ ms"), "");
  EXPECT_EQ(text, R"(flops profile of step 1: Gpt
  parameters 1.77 K, forward 26.76 KMACs, 53.52 KFLOPs
  with backward 160.56 KFLOPs
  depth 1: blocks (ModuleList): 1.68 Kparams, 50.88 KFLOPs (95%), head (Head): 88 params, 2.64 KFLOPs (5%)
  depth 2: blocks.0 (Block): 840 params, 25.44 KFLOPs (48%), blocks.1 (Block): 840 params, 25.44 KFLOPs (48%)
  modules:
    model (Gpt): 1.77 Kparams, 53.52 KFLOPs (100%)
      tokens (Embedding): 88 params, 0 FLOPs (0%)
      blocks (ModuleList): 1.68 Kparams, 50.88 KFLOPs (95%)
        blocks.0 (Block): 840 params, 25.44 KFLOPs (48%)
        blocks.1 (Block): 840 params, 25.44 KFLOPs (48%)
      head (Head): 88 params, 2.64 KFLOPs (5%))");
}

TEST(FlopsProfiler, ATimeIsThatOfWhatIsSeen) {
  const auto model = std::make_shared<Gpt>();
  FlopsProfiler profiler(model);
  {
    const auto counting = profiler.start();
    model->forward(ids());
  }
  const std::string text = profiler.text();
  EXPECT_TRUE(std::regex_search(text, std::regex("blocks\\.0 \\(Block\\): [^\\n]*, [0-9.]+ ms\\n"))) << text;
  EXPECT_TRUE(std::regex_search(text, std::regex("blocks\\.0\\.mlp \\(Sequential\\): [^\\n]*%\\)\\n"))) << text;
}

TEST(FlopsProfiler, AForwardThatThrowsAndACopyOfTheModel) {
  const auto model = std::make_shared<Gpt>();
  FlopsProfiler profiler(model);
  {
    const auto counting = profiler.start();
    const auto second = model->blocks->ptr<BlockImpl>(1);
    second->fails = true;
    EXPECT_THROW(model->forward(ids()), std::runtime_error);
    second->fails = false;
    at::ones({2, 2}).mm(at::ones({2, 2}));
  }
  auto found = operations_of(profiler);
  EXPECT_EQ(found["blocks.1"], 0);
  EXPECT_EQ(found["blocks.0"], by_formula()["blocks.0"]);
  EXPECT_EQ(found[""], found["blocks.0"] + 16);
}

Config config(int stage, const std::string& more = "") {
  return Config::from_json(R"({"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "tessera": {"min_unit_elements": 1}, "zero_optimization": {"stage3_param_persistence_threshold": 0, "stage": )" +
                           std::to_string(stage) + "}" + more + "}");
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Of gathered parameters, of casts of weights, of a forward that is computed again.
TEST(FlopsProfiler, AnEngineProfilesAForward) {
  const std::string autocast = R"(, "torch_autocast": {"enabled": true, "dtype": "bf16"})";
  for (const int ranks : {1, 2})
    for (int stage = 0; stage < 4; ++stage)
      for (const std::string& more : {std::string(), autocast}) {
        const io::TempFolder folder;
        const std::string file = folder / "profile";
        const std::string section = R"(, "flops_profiler": {"enabled": true, "module_depth": 1, "profile_step": 1,
            "recompute_fwd_factor": 1, "output_file": ")" +
                                    file + "\"}";
        ::testing::internal::CaptureStdout();
        testing::run_ranks(ranks, [&](int, const comm::GroupPtr& group) {
          auto engine = initialize(std::make_shared<Gpt>(), config(stage, more + section), comm::Mesh(group));
          for (int step = 0; step < 3; ++step) {
            EXPECT_EQ(engine.flops_profiler() != nullptr, step > 1);
            engine.module().eval();
            engine.forward(ids());
            engine.module().train();
            EXPECT_EQ(engine.flops_profiler() != nullptr, step > 1);
            engine.forward(ids()).sum().backward();
            EXPECT_TRUE(engine.step());
          }
          EXPECT_EQ(operations_of(*engine.flops_profiler()), by_formula()) << stage << more;
          EXPECT_EQ(engine.flops_profiler()->profile().operations(), 2 * by_formula()[""]);
          EXPECT_EQ(engine.flops_profiler()->profile().parameters(), 1768);
          auto timed = kUnits;
          timed.insert("");
          EXPECT_EQ(timed_in(*engine.flops_profiler()), timed);
        });
        EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
        const std::string text = text_of(file);
        EXPECT_TRUE(text.starts_with("flops profile of step 1: Gpt\n")) << text;
        EXPECT_EQ(text.find("flops profile", 1), std::string::npos) << text;
        EXPECT_EQ(text.find("blocks.0"), std::string::npos) << text;
      }
}

TEST(FlopsProfiler, LayersThatAnEngineGathersAreTimed) {
  for (const int stage : {0, 3})
    testing::run_ranks(2, [&](int, const comm::GroupPtr& group) {
      const torch::nn::Sequential model(torch::nn::Linear(2, 3), torch::nn::Tanh(), torch::nn::Linear(3, 4));
      auto engine = initialize(model, config(stage), comm::Mesh(group));
      FlopsProfiler profiler(model);
      {
        const auto counting = profiler.start();
        engine.forward(at::ones({5, 2}));
      }
      EXPECT_EQ(timed_in(profiler), stage == 3 ? (std::set<std::string>{"0", "2"}) : std::set<std::string>());
      EXPECT_EQ(operations_of(profiler), (std::map<std::string, int64_t>{{"", 180}, {"0", 60}, {"1", 0}, {"2", 120}}));
    });
}

// Of layers that tensor_parallel cuts, this rank's part.
TEST(FlopsProfiler, AModelThatIsCut) {
  for (const int stage : {0, 3})
    testing::run_axes({{comm::Axis::DpShard, 2}, {comm::Axis::Tp, 2}}, [&](int, const comm::Mesh& mesh) {
      struct Pair : torch::nn::Module {
        torch::nn::Linear up{register_module("up", torch::nn::Linear(6, 8))};
        torch::nn::Linear down{register_module("down", torch::nn::Linear(8, 6))};
        at::Tensor forward(const at::Tensor& x) { return down(at::tanh(up(x))); }
      };
      const auto model = std::make_shared<Pair>();
      const auto cut = config(stage, R"(, "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
          {"patterns": ["up"], "partition_type": "column"}, {"patterns": ["down"], "partition_type": "row"}]}},
          "flops_profiler": {"enabled": true, "profile_step": 0, "output_file": "/dev/null"})");
      auto engine = initialize(model, cut, mesh);
      engine.forward(at::ones({4, 6})).sum().backward();
      engine.step();
      EXPECT_EQ(operations_of(*engine.flops_profiler()),
                (std::map<std::string, int64_t>{{"", 2 * 4 * 48}, {"up", 4 * 48}, {"down", 4 * 48}}));
    });
}

// A profile and count_flops() at the same time.
TEST(FlopsProfiler, OperationsOfAStepAreCountedBesideIt) {
  auto engine = initialize(torch::nn::Linear(2, 3), config(0, R"(, "flops_profiler": {"enabled": true,
      "profile_step": 0, "detailed": false})"),
                           comm::Mesh());
  std::map<std::string, double> seen;
  engine.on_metric([&](const std::string& name, double value, int64_t) { seen[name] = value; });
  engine.count_flops({}, 1e12);
  ::testing::internal::CaptureStdout();
  for (int step = 0; step < 3; ++step) {
    engine.forward(at::ones({3, 2})).sum().backward();
    engine.step();
  }
  EXPECT_HAS(::testing::internal::GetCapturedStdout(),
             "flops profile of step 0: Linear\n  parameters 9, forward 18 MACs, ");
  EXPECT_EQ(engine.flops_profiler()->rows()[0].operations, 2 * 3 * 6);
  EXPECT_NEAR(seen["Train/Samples/tflops"] * 1e12 / seen["Train/Samples/samples_per_second"], 3 * 2 * 6, 1e-9);
}

TEST(FlopsProfiler, AFileThatCannotBeWrittenIsWarnedOf) {
  const io::TempFolder folder;
  auto asked = config(1, R"(, "flops_profiler": {"enabled": true, "profile_step": 0})");
  asked.flops_profiler.output_file = "/no/such/folder/profile";
  asked.tessera.json_lines = folder / "lines";
  auto engine = initialize(torch::nn::Linear(2, 3), asked, comm::Mesh());
  const testing::KeptWarnings kept;
  ::testing::internal::CaptureStdout();
  engine.forward(at::ones({3, 2}));
  EXPECT_HAS(::testing::internal::GetCapturedStdout(), "flops profile of step 0: Linear");
  ASSERT_EQ(kept.lines.size(), 1U) << ::testing::PrintToString(kept.lines);
  EXPECT_HAS(kept.lines[0],
             "[flops_profiler] cannot write flops_profiler.output_file '/no/such/folder/profile': No such");
  EXPECT_HAS(text_of(folder / "lines"), "[flops_profiler] cannot write");
}

// By every stage, of a forward of its own; the first one shows it.
TEST(FlopsProfiler, AStageOfAPipeline) {
  const io::TempFolder folder;
  testing::Case c;
  c.more =
      R"("flops_profiler": {"enabled": true, "profile_step": 0, "output_file": ")" + (folder / "profile") + "\"}, ";
  testing::run_stages(c, [&](const comm::Parts& parts) {
    Pipeline engine(testing::layers(), c.config(), parts, c.options());
    EXPECT_EQ(engine.flops_profiler(), nullptr);
    engine.train_batch(testing::data_of(c, parts, 0));
    auto found = operations_of(*engine.flops_profiler());
    const int64_t square = 2 * 3 * testing::kWidth * testing::kWidth;  // of one micro-batch
    const std::string block = engine.is_first_stage() ? "layers.1" : "layers.8";
    EXPECT_EQ(found[block], square);
    EXPECT_EQ(found[""], found["layers"]);
    EXPECT_GT(found[""], square);
  });
  const std::string text = text_of(folder / "profile");
  EXPECT_TRUE(text.starts_with("flops profile of step 0: StageLayers\n")) << text;
  EXPECT_HAS(text, "layers.1.linear (Linear): ");
  EXPECT_EQ(text.find("flops profile", 1), std::string::npos) << text;
}

}  // namespace
}  // namespace tessera::nn::flops_profiler_tests

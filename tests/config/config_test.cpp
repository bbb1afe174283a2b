#include "tessera/config/config.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support.h"
#include "tessera/config/json.h"
#include "tessera/config/source.h"

namespace tessera::config {
namespace {

// The kind of file that users have.
const char* const kTypical = R"({
  // comments are fine
  "train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
  "fp16": {"enabled": false, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": true,
                        "offload_optimizer": {"device": "none", "pin_memory": true}, "offload_param": false},
  "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": false,
})";

TEST(Config, AnswersByPathAndAsATree) {
  const Config c = Config::from_json(kTypical);
  const std::vector<std::pair<const char*, Value>> rows{
      {"zero_optimization.stage", 2},
      {"bfloat16.enabled", true},
      {"zero_optimization.max_live_parameters", 1'000'000'000},
      {"gradient_clipping", 1.0},
      {"gradient_allreduce_op", "mean"},
      {"zero_optimization.offload_optimizer.device", "none"},
      {"seq_parallel_communication_data_type", "fp32"},
      {"communication_data_type", {}},
      {"optimizer.params", Params{{"lr", 3e-4}, {"betas", List{0.9, 0.95}}}},
      {"zero_optimization.leaf_module.names", List{}},
      {"timers", Params{{"throughput", Params{{"enabled", true}, {"synchronized", true}}}}},
  };
  for (const auto& [path, want] : rows)
    EXPECT_EQ(c.get(path), want) << path;
  const auto error = [&](const char* path) { return error_of([&] { c.get(path); }); };
  EXPECT_HAS(error("zero_optimization.stag"),
             "no key 'zero_optimization.stag'; did you mean 'zero_optimization.stage'?");
  EXPECT_HAS(error("zero_optimisation.stage"), "did you mean 'zero_optimization'?");
  EXPECT_HAS(error("zero_optimization.stage.x"), "see docs/config.md");
  EXPECT_HAS(error("qqqqqqqq"), "see docs/config.md");

  Params tree = c.to_dict();
  EXPECT_EQ(Value(tree), c.get(""));
  EXPECT_EQ(std::get<Params>(tree.at("zero_optimization").data).at("stage"), Value(2));
  EXPECT_EQ(Config::from_json(Value(tree).text()).to_dict(), tree) << "it is read to the same values";
}

TEST(Config, ReadsATypicalFileFromTextAndPath) {
  const auto path = std::filesystem::temp_directory_path() / "tessera_config_test.json";
  std::ofstream(path) << kTypical;
  for (const Config& c : {Config::from_json(kTypical), Config::from_file(path.string())}) {
    EXPECT_EQ(c.train_batch_size, 32);
    EXPECT_FALSE(c.train_micro_batch_size_per_gpu);
    EXPECT_EQ(c.optimizer.type, "AdamW");
    EXPECT_EQ(c.optimizer.params.at("lr"), Value(3e-4));
    EXPECT_FALSE(c.optimizer.params.contains("eps"));
    EXPECT_TRUE(c.bf16.enabled);
    EXPECT_EQ(c.zero_optimization.stage, 2);
    EXPECT_EQ(c.zero_optimization.reduce_bucket_size, 500'000'000);
    EXPECT_EQ(c.gradient_clipping, 1.0);
    EXPECT_EQ(c.steps_per_print, 2000);
    EXPECT_TRUE(c.warnings.empty()) << c.warnings[0];
  }
  std::filesystem::remove(path);
}

TEST(Config, TakesAReadyValueWithInfinity) {
  const Config c = from_value({{"steps_per_print", INFINITY}, {"zero_optimization", {{"stage", 1.0}}}});
  EXPECT_FALSE(c.steps_per_print);
  EXPECT_EQ(c.zero_optimization.stage, 1);
  EXPECT_HAS(error_of([] { from_value(nlohmann::json::array()); }), "must be an object");
}

TEST(Config, HasTheReferenceDefaults) {
  const Config c;
  EXPECT_EQ(c.gradient_clipping, 1.0);
  EXPECT_TRUE(c.bf16.check_grad_overflow);
  EXPECT_TRUE(c.zero_optimization.offload_optimizer.pin_memory);
  EXPECT_TRUE(c.zero_optimization.offload_param.pin_memory);
  EXPECT_TRUE(c.managed_gradient_accumulation);
  EXPECT_EQ(c.fp16.loss_scale, 0);
  EXPECT_EQ(c.fp16.initial_scale_power, 16);
  EXPECT_FALSE(c.zero_optimization.overlap_comm);
  EXPECT_FALSE(c.steps_per_print);
  EXPECT_EQ(c.zero_optimization.leaf_module.classes.size(), 3u);
  c.validate();
}

TEST(Config, OneErrorListsEverythingWrong) {
  const std::string text = json_error(R"({
    "zero_optimization": {"stge": 2, "stage": 7, "reduce_bucket_size": "big"},
    "bf16": {"enabled": true, "loss_scale": 0}, "fp16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"learning_rate": 1, "lr": -1}},
    "train_batch_size": 0, "train_batch_size": 8})");
  EXPECT_HAS(text, "[config] ");
  EXPECT_HAS(text, "problems in the configuration");
  EXPECT_HAS(text, "zero_optimization.stge: unknown key; did you mean \"stage\"?");
  EXPECT_HAS(text, "zero_optimization.stage: must be integer from 0 to 3, got 7");
  EXPECT_HAS(text, "zero_optimization.reduce_bucket_size: must be integer >= 0, got \"big\"");
  EXPECT_HAS(text, "bf16.loss_scale: unknown key; it belongs to fp16");
  EXPECT_HAS(text, "fp16 and bf16 cannot be enabled together");
  EXPECT_HAS(text, "optimizer.params.learning_rate: unknown parameter");
  EXPECT_HAS(text, "optimizer.params.lr: must be a number >= 0");
  EXPECT_HAS(text, "train_batch_size: this key is given twice");
}

TEST(Config, ValidatesATreeFilledByHand) {
  Config c;
  c.zero_optimization.stage = 4;
  c.gradient_clipping = NAN;
  c.optimizer = {.type = "AdamW", .params = {{"lr", 1e-3}, {"betas", List{0.9, 1.5}}}};
  const std::string text = error_of([&] { c.validate(); });
  EXPECT_HAS(text, "zero_optimization.stage");
  EXPECT_HAS(text, "gradient_clipping");
  EXPECT_HAS(text, "optimizer.params.betas");
}

TEST(Config, FileErrorsNameTheFile) {
  EXPECT_HAS(error_of([] { Config::from_file("/nowhere/x.json"); }), "/nowhere/x.json");
  EXPECT_HAS(error_of([] { Config::from_file("/tmp"); }), "/tmp is a folder; give the JSON file");
  EXPECT_HAS(error_of([] { Config::from_file("/dev/null"); }), "/dev/null is empty or cannot be read");
  EXPECT_HAS(error_of([] { config_of("/proc/cpuinfo"); }), "/proc/cpuinfo: parse error at line 1");
}

Config triple(std::optional<int64_t> total, std::optional<int64_t> micro, std::optional<int64_t> steps) {
  Config c;
  c.train_batch_size = total;
  c.train_micro_batch_size_per_gpu = micro;
  c.gradient_accumulation_steps = steps;
  return c;
}

TEST(Config, ResolvesTheBatchTriple) {
  const auto none = std::nullopt;
  struct Row {
    std::optional<int64_t> total, micro, steps;
    int64_t want_total, want_micro, want_steps;
  };
  for (const Row& row : {Row{24, 2, 3, 24, 2, 3}, Row{24, 2, none, 24, 2, 3}, Row{24, none, 3, 24, 2, 3},
                         Row{none, 2, 3, 24, 2, 3}, Row{24, none, none, 24, 6, 1}, Row{none, 2, none, 8, 2, 1}}) {
    const Batch got = triple(row.total, row.micro, row.steps).resolve_batch(4);
    EXPECT_EQ(got.train_batch_size, row.want_total);
    EXPECT_EQ(got.micro_batch_size, row.want_micro);
    EXPECT_EQ(got.gradient_accumulation_steps, row.want_steps);
  }
}

TEST(Config, RefusesABatchTripleThatDoesNotFit) {
  const auto none = std::nullopt;
  const auto of = [](const Config& c, int64_t world) { return error_of([&] { c.resolve_batch(world); }); };
  EXPECT_HAS(of(triple(32, 4, 2), 3), "32 = 4 * 2 * 3");
  EXPECT_HAS(of(triple(none, none, 4), 2), "? = ? * 4 * 2");
  EXPECT_HAS(of(triple(none, none, none), 2), "train_micro_batch_size_per_gpu");
  EXPECT_HAS(of(triple(3, none, none), 2), "found 3 != 1 * 1 * 2");
  EXPECT_HAS(of(triple(2, 4, none), 1), "found 2 != 4 * 0 * 1");
  EXPECT_HAS(of(triple(2, none, 4), 1), "do not fit");
  EXPECT_HAS(of(triple(1, none, none), 2), "do not fit");
  EXPECT_HAS(of(triple(0, none, none), 2), "must be >= 1");
  EXPECT_HAS(of(triple(8, 0, none), 2), "must be >= 1");
  const int64_t large = int64_t{1} << 52;
  EXPECT_EQ(of(triple(none, large / 4, 2), 2), "");
  for (const Config& c :
       {triple(none, large * 1024, 4), triple(none, large, none), triple(none, 1, large), triple(none, large, large),
        triple(large * 2, none, none), triple(8, 1, large * 1024), triple(large * 2, 1, large)})
    EXPECT_HAS(of(c, 2),
               "the batch is too large: more than 2^52 samples, up to which they are counted. train_batch_size");
  for (const char* number : {"9223372036854775808", "99999999999999999999999", "1e30"})
    for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})
      EXPECT_HAS(error_of([&] { Config::from_json(c10::str("{\"", key, "\": ", number, "}")); }), "too large");
  EXPECT_HAS(of(triple(8, none, none), 0), "data-parallel size");
}

TEST(Config, DescribesWithOrigins) {
  Config c = Config::from_json(R"({"bfloat16": {"enabled": true}, "gradient_clipping": 1.0})");
  c.zero_optimization.stage = 2;
  const std::string all = c.describe();
  EXPECT_HAS(all, "bf16.enabled = true (given as bfloat16.enabled)\n");
  EXPECT_HAS(all, "gradient_clipping = 1.0 (given)\n");
  EXPECT_HAS(all, "zero_optimization.stage = 2 (given)\n");
  EXPECT_HAS(all, "steps_per_print = unset (default)\n");
  EXPECT_HAS(all, "train_batch_size = unset (derived by resolve_batch)\n");
  EXPECT_HAS_NOT(c.describe(false), "default");
}

}  // namespace
}  // namespace tessera::config

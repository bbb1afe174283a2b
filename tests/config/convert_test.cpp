#include "tessera/config/convert.h"

#include <nlohmann/json.hpp>

#include "support.h"

namespace tessera::config {
namespace {

TEST(Convert, NumbersAreLenient) {
  const Config c = Config::from_json(R"({
    "zero_optimization": {"reduce_bucket_size": 2e8, "allgather_bucket_size": "1000", "stage": 1.0,
                          "contiguous_gradients": 0, "reduce_scatter": "True",
                          "stage3_max_live_parameters": 1e12},
    "gradient_predivide_factor": 2})");
  EXPECT_EQ(c.zero_optimization.reduce_bucket_size, 200'000'000);
  EXPECT_EQ(c.zero_optimization.allgather_bucket_size, 1000);
  EXPECT_EQ(c.zero_optimization.stage, 1);
  EXPECT_EQ(c.zero_optimization.stage3_max_live_parameters, 1'000'000'000'000);
  EXPECT_FALSE(std::get<bool>(c.unread.at("zero_optimization.contiguous_gradients")));
  EXPECT_TRUE(c.zero_optimization.reduce_scatter);
  EXPECT_EQ(c.gradient_predivide_factor, 2.0);
}

TEST(Convert, RefusesWhatIsNoNumber) {
  for (const char* bad : {"1.5", "true", "\"x\"", "[1]", "{}", "1e30", "Infinity", "18446744073709551615", "-1"}) {
    const std::string text = std::string(R"({"zero_optimization": {"reduce_bucket_size": )") + bad + "}}";
    EXPECT_HAS(json_error(text), "zero_optimization.reduce_bucket_size: must be integer >= 0") << bad;
  }
  EXPECT_HAS(json_error(R"({"gradient_clipping": NaN})"), "gradient_clipping: must be number >= 0");
  EXPECT_HAS(json_error(R"({"gradient_clipping": Infinity})"), "gradient_clipping: must be number >= 0");
  EXPECT_HAS(json_error(R"({"bf16": {"enabled": 2}})"), "bf16.enabled: must be true or false, got 2");
}

TEST(Convert, BoolForANumberWarns) {
  const Config c = Config::from_json(R"({"gradient_clipping": true})");
  EXPECT_EQ(c.gradient_clipping, 1.0);
  ASSERT_EQ(c.warnings.size(), 1u);
  EXPECT_HAS(c.warnings[0], "gradient_clipping: true was read as the number 1.0");
  for (const char* key : {"loss_scale", "loss_scale_window", "min_loss_scale"}) {
    EXPECT_HAS(json_error(std::string(R"({"fp16": {")") + key + "\": true}}"), key);
  }
}

TEST(Convert, NullAndAutoMeanAbsent) {
  const Config c = Config::from_json(R"({"gradient_clipping": null, "steps_per_print": "auto",
    "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto",
                          "offload_optimizer": {"device": "none", "nvme_path": null}},
    "data_types": {"grad_accum_dtype": null}, "bf16": null, "fp16": "auto",
    "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": null}}})");
  EXPECT_EQ(c.gradient_clipping, 1.0);
  EXPECT_EQ(c.zero_optimization.reduce_bucket_size, 500'000'000);
  EXPECT_FALSE(c.data_types.grad_accum_dtype);
  EXPECT_FALSE(c.given.contains("gradient_clipping"));
  EXPECT_FALSE(c.optimizer.params.contains("lr"));
}

TEST(Convert, ReadsDtypesInEverySpelling) {
  using c10::ScalarType;
  const auto read = [](const std::string& name) {
    return Config::from_json(R"({"torch_autocast": {"dtype": ")" + name + "\"}}").torch_autocast.dtype;
  };
  for (const char* name : {"fp16", "float16", "half", "torch.float16"}) {
    EXPECT_EQ(read(name), ScalarType::Half);
  }
  for (const char* name : {"bf16", "bfloat16", "torch.bfloat16"}) {
    EXPECT_EQ(read(name), ScalarType::BFloat16);
  }
  EXPECT_EQ(read("float32"), ScalarType::Float);
  EXPECT_HAS(json_error(R"({"torch_autocast": {"dtype": "int8"}})"), "must be fp32, fp16 or bf16, got \"int8\"");
}

TEST(Convert, ReadsListsChoicesAndOpenValues) {
  const Config c = Config::from_json(R"({
    "zero_optimization": {"leaf_module": {"classes": "Block", "names": ["a", "b", "a"]}},
    "gradient_allreduce_op": "SUM", "checkpoint": {"tag_validation": "FAIL"}, "log_level": "INFO",
    "tensor_parallel": {"preset_model": "Llama", "partition_config": {"layer_specs": [{"patterns": ["x"]}]}},
    "elasticity": {"micro_batch_sizes": [2, 4.0]}})");
  EXPECT_EQ(c.zero_optimization.leaf_module.classes, std::vector<std::string>{"Block"});
  EXPECT_EQ(c.zero_optimization.leaf_module.names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(c.gradient_allreduce_op, GradientOp::Sum);
  EXPECT_EQ(c.checkpoint.tag_validation, TagValidation::Fail);
  EXPECT_EQ(c.log_level, "info");
  EXPECT_EQ(c.tensor_parallel.preset_model, "llama");
  EXPECT_EQ(c.tensor_parallel.partition_config.text(), R"({"layer_specs": [{"patterns": ["x"]}]})");
  EXPECT_EQ(c.elasticity.micro_batch_sizes, (std::vector<int64_t>{2, 4}));
  EXPECT_HAS(json_error(R"({"gradient_allreduce_op": "max"})"), "one of mean, sum");
  EXPECT_HAS(json_error(R"({"tensor_parallel": {"preset_model": "gpt9"}})"), "one of llama, bloom");
  EXPECT_HAS(json_error(R"({"torch_autocast": {"lower_precision_safe_modules": ["a", 1]}})"), "list of texts");
  EXPECT_HAS(json_error(R"({"tensor_parallel": {"tp": {"mpu": {}}}})"), "must be null");
}

TEST(Convert, KeepsParametersAsWritten) {
  const auto value = nlohmann::json::parse(R"({"a": 1, "b": 1.0, "c": [true, null], "d": {"e": "x"}})");
  const Value got = to_value(value);
  EXPECT_EQ(got, Value(Params{{"a", 1}, {"b", 1.0}, {"c", List{true, Value()}}, {"d", Params{{"e", "x"}}}}));
  EXPECT_FALSE(Value(1) == Value(1.0));
}

}  // namespace
}  // namespace tessera::config

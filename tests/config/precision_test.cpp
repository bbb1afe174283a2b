#include "tessera/config/precision.h"

#include "support.h"

namespace tessera::config {
namespace {

using amp::Master;
using c10::ScalarType;
using kernels::Rounding;

amp::PrecisionPolicy of(const std::string& json) {
  return precision(Config::from_json(json));
}

// `more` inside the bf16 section and behind it.
std::string bf16(const std::string& section, const std::string& behind = "") {
  return R"({"zero_optimization": {"stage": 1}, "bf16": {"enabled": true)" + section + "}" + behind + "}";
}
const char* const kLow = R"(, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true)";

struct Row {
  std::string json;
  ScalarType param;
  int64_t bytes;
  Master master;
  ScalarType state;
  Rounding rounding = Rounding::Stochastic;
};

TEST(Precision, ModesOfTheKeys) {
  constexpr auto kBf16 = ScalarType::BFloat16, kFp32 = ScalarType::Float, kFp16 = ScalarType::Half;
  const auto own = [](const std::string& keys) { return R"(, "tessera": {)" + keys + "}"; };
  const std::vector<Row> rows{
      {"{}", kFp32, 16, Master::Weight, kFp32},
      {bf16(""), kBf16, 14, Master::Split, kFp32},
      {bf16(kLow), kBf16, 10, Master::Split, kBf16},
      {bf16(kLow, own(R"("rounding": "nearest")")), kBf16, 8, Master::Weight, kBf16, Rounding::Nearest},
      {bf16(kLow, own(R"("rounding": "nearest", "state_bytes": 10)")), kBf16, 10, Master::Split, kBf16,
       Rounding::Nearest},
      {bf16(kLow, own(R"("state_bytes": 8)")), kBf16, 8, Master::Weight, kBf16},
      {bf16("", own(R"("state_bytes": 16)")), kBf16, 16, Master::Fp32, kFp32},
      {bf16("", own(R"("state_bytes": 10)")), kBf16, 10, Master::Split, kBf16},
      {bf16(R"(, "bf16_master_weights_and_grads": true)", own(R"("state_bytes": 12)")), kBf16, 12, Master::Weight,
       kFp32},
      {R"({"fp16": {"enabled": true}})", kFp16, 16, Master::Fp32, kFp32},
      {R"({"fp16": {"enabled": true, "fp16_master_weights_and_gradients": true}, "zero_optimization": {"stage": 2},
           "tessera": {"state_bytes": 12}})",
       kFp16, 12, Master::Weight, kFp32},
  };
  for (const Row& row : rows) {
    const auto policy = of(row.json);
    EXPECT_EQ(policy.param, row.param) << row.json;
    EXPECT_EQ(policy.grad, row.param) << row.json;
    EXPECT_EQ(policy.master, row.master) << row.json;
    EXPECT_EQ(policy.state, row.state) << row.json;
    EXPECT_EQ(policy.rounding, row.rounding) << row.json;
    EXPECT_EQ(policy.bytes_per_parameter(), row.bytes) << row.json;
    EXPECT_EQ(policy.skip_nonfinite, row.param != kFp32) << row.json;
  }
}

TEST(Precision, GradientsMayAccumulateInFp32AndOverflowMayPass) {
  const auto policy =
      of(R"({"bf16": {"enabled": true, "check_grad_overflow": false}, "data_types": {"grad_accum_dtype": "fp32"}})");
  EXPECT_EQ(policy.grad, ScalarType::Float);
  EXPECT_EQ(policy.param, ScalarType::BFloat16);
  EXPECT_FALSE(policy.skip_nonfinite);
}

TEST(Precision, WhatNamesNoMode) {
  const std::vector<std::pair<std::string, const char*>> rows{
      {R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})", "cannot be enabled together"},
      {R"({"bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}})", "data_types.param_dtype"},
      {bf16("", R"(, "tessera": {"state_bytes": 9})"), "must be 16, 14, 12, 10, 8; got 9"},
      {R"({"tessera": {"state_bytes": 14}})", "with fp32 parameters must be 16; got 14"},
      {R"({"fp16": {"enabled": true}, "tessera": {"state_bytes": 10}})", "with fp16 parameters must be 16, 12"},
      {bf16(kLow, R"(, "tessera": {"state_bytes": 14})"), "14 contradicts"},
      {bf16("", R"(, "tessera": {"rounding": "up"})"), "tessera.rounding"},
  };
  for (const auto& [json, text] : rows)
    EXPECT_HAS(json_error(json.c_str()), text) << json;
  for (const char* json : {R"({"bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16"}})",
                           R"({"data_types": {"param_dtype": "fp32"}})"})
    EXPECT_EQ(json_error(json), "") << json;
}

TEST(Precision, LowPrecisionStatesOfADisabledSectionAreNamed) {
  const auto config = Config::from_json(R"({"zero_optimization": {"stage": 1},
      "bf16": {"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}})");
  ASSERT_EQ(config.warnings.size(), 1);
  EXPECT_HAS(config.warnings[0], "bf16.bf16_master_weights_and_grads: has no effect while bf16.enabled is false");
}

}  // namespace
}  // namespace tessera::config

#include "tessera/config/served.h"

#include "support.h"
#include "tessera/config/lookup.h"

namespace tessera::config {
namespace {

std::string refusal(const std::string& json) {
  const Config config = Config::from_json(json);
  return error_of<c10::NotImplementedError>([&] { check_served(config); });
}

TEST(Served, AcceptsWhatThisVersionDoes) {
  for (
      const char* json :
      {"{}", R"({"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}})",
       R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}})",
       R"({"bf16": {"enabled": true}, "communication_data_type": "bf16"})", R"({"fp16": {"enabled": true}})",
       R"({"communication_data_type": "fp16"})",
       R"({"torch_autocast": {"enabled": true, "dtype": "bf16"}, "bf16": {"enabled": true}})",
       R"({"fp16": {"enabled": true, "loss_scale": 128}, "data_types": {"grad_accum_dtype": "fp16"}})",
       R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "cpu"}}})",
       R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}})",
       R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5, "pipeline_read": true}}})",
       R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}}})",
       R"({"wall_clock_breakdown": true, "flops_profiler": {"enabled": false}, "amp": {"enabled": false}})",
       R"({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2})",
       R"({"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": false}}})",
       R"({"optimizer": {"type": "Lion", "params": {"fp32_optimizer_states": false}},
           "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},
           "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})",
       R"({"optimizer": {"type": "NAdam"}, "scheduler": {"type": "StepLR", "params": {"step_size": 3}}})"}) {
    EXPECT_EQ(refusal(json), "") << json;
  }
}

TEST(Served, RefusesByName) {
  const std::vector<std::pair<const char*, const char*>> rows{
      {R"({"data_types": {"grad_accum_dtype": "fp16"}})", "data_types.grad_accum_dtype"},
      {R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "super_offload": true}}})",
       "zero_optimization.offload_optimizer.super_offload"},
      {R"({"graph_harvesting": true})", "graph_harvesting"},
      {R"({"zero_optimization": {"zero_hpz_partition_size": 2}})", "zero_optimization.zero_hpz_partition_size"},
      {R"({"data_types": {"grad_accum_dtype": "bf16"}})", "data_types.grad_accum_dtype"},
      {R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}})", "data_types.grad_accum_dtype"},
      {R"({"optimizer": {"type": "MuAdam"}})", "optimizer.type"},
      {R"({"optimizer": {"type": "OneBitLamb"}})", "optimizer.type"},
      {R"({"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": false}},
           "bf16": {"enabled": true, "bf16_master_weights_and_grads": true},
           "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})",
       "optimizer.params"},
      {R"({"progressive_layer_drop": {"enabled": true}})", "progressive_layer_drop"},
      {R"({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}})", "zero_optimization.zeropp_loco_param"},
  };
  for (const auto& [json, key] : rows) {
    EXPECT_HAS(refusal(json), std::string("  ") + key + " (") << json;
  }
}

TEST(Served, OneErrorNamesAll) {
  const std::string text = refusal(
      R"({"graph_harvesting": true, "zero_optimization": {"zero_hpz_partition_size": 2}, "nebula": {"enabled": true}})");
  EXPECT_HAS(text, "[config]");
  EXPECT_HAS(text, "graph_harvesting (true)");
  EXPECT_HAS(text, "zero_optimization.zero_hpz_partition_size (> 1)");
  EXPECT_HAS(text, "nebula (switched on)");
}

TEST(Served, TheDocsListEveryRow) {
  const std::string text = page();
  for (const Refusal& row : refusals()) {
    EXPECT_HAS(text, "| `" + std::string(row.key) + "` | " + row.when + " |\n") << "missing in docs/config.md";
  }
  for (const auto& rows : {python_only(), python_reads()})
    for (const Refusal& row : rows)
      EXPECT_HAS(text, "| `" + std::string(row.key) + "` | " + row.when + " |\n") << "missing in docs/config.md";
  for (const Unread& row : unread()) {
    EXPECT_HAS(text, "| `" + std::string(row.key) + "` | " + row.instead + " |\n") << "missing in docs/config.md";
  }
}

TEST(Served, TheStateTableOfTheDocsIsUpToDate) {
  expect_table("state", state_table());
}

TEST(Served, WhatIsReadByNothingWarns) {
  const Config config = Config::from_json(
      R"({"data_parallel_size": 4, "zero_optimization": {"override_module_apply": false, "sub_group_size": 1e9}})");
  ASSERT_EQ(config.warnings.size(), 2u);
  EXPECT_EQ(config.warnings[0],
            "data_parallel_size: has no effect in this version; the process group says how many ranks there are");
  EXPECT_HAS(config.warnings[1], "zero_optimization.override_module_apply: has no effect");
  for (const Unread& row : unread())
    EXPECT_NE(find_key(row.key), nullptr) << row.key;
}

TEST(Served, CppRefusesWhatOnlyPythonServes) {
  const Config asks = Config::from_json(R"({"csv_monitor": {"enabled": true}, "comms_logger": {"enabled": true}})");
  check_served(asks);
  const std::string text = error_of<c10::NotImplementedError>([&] { check_cpp_serves(asks); });
  EXPECT_HAS(text, "only the Python front end serves");
  EXPECT_HAS(text, "csv_monitor.enabled (true)");
  EXPECT_HAS(text, "comms_logger.enabled (true)");
  const Config harmless = Config::from_json(R"({"log_level": "info"})");
  EXPECT_EQ(check_cpp_serves(harmless), (std::vector<std::string>{"log_level (any): has no effect in C++"}));
}

TEST(Served, EveryRowNamesAKeyAndDefaultsAreServed) {
  for (const auto& rows : {refusals(), python_only(), python_reads()}) {
    for (const Refusal& row : rows) {
      EXPECT_NE(find_key(row.key), nullptr) << row.key;
      EXPECT_FALSE(row.refused(Config{})) << row.key;
    }
  }
}

}  // namespace
}  // namespace tessera::config

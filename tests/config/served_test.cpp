#include "tessera/config/served.h"

#include <cctype>
#include <set>

#include "support.h"
#include "tessera/config/lookup.h"
#include "tessera/config/resolve.h"

namespace tessera::config {
namespace {

std::string refusal(const std::string& json) {
  const Config config = Config::from_json(json);
  return error_of<c10::NotImplementedError>([&] { check_served(config); });
}

TEST(Served, AcceptsWhatThisVersionDoes) {
  for (
      const char* json :
      {"{}",
       R"({"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}})",
       R"({"optimizer": {"type": "Muon", "params": {"per_head_muon": false}}, "disable_python_gc": false})",
       R"({"bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": ["bias*"]}})",
       R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}})",
       R"({"bf16": {"enabled": true}, "communication_data_type": "bf16"})",
       R"({"fp16": {"enabled": true}})",
       R"({"communication_data_type": "fp16"})",
       R"({"torch_autocast": {"enabled": true, "dtype": "bf16"}, "bf16": {"enabled": true}})",
       R"({"fp16": {"enabled": true, "loss_scale": 128}, "data_types": {"grad_accum_dtype": "fp16"}})",
       R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "cpu"}}})",
       R"({"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}})",
       R"({"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}})",
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
      {R"({"optimizer": {"type": "Muon", "params": {"per_head_muon": true}}})", "optimizer.params"},
      {R"({"disable_python_gc": true})", "disable_python_gc"},
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
    EXPECT_HAS(text, "| `" + std::string(row.key) + "` | " + row.when + " |\n") << "missing in docs/config_served.md";
  }
  for (const Refusal& row : python_only())
    EXPECT_HAS(text, "| `" + std::string(row.key) + "` | " + row.when + " |\n") << "missing in docs/config_served.md";
  for (const char* type : {"LambdaLR", "MultiplicativeLR", "ReduceLROnPlateau"})
    EXPECT_HAS(where_schedule_runs(type), "does in Python only");
  EXPECT_HAS(text, "| `scheduler.type` | LambdaLR, MultiplicativeLR, ReduceLROnPlateau, unless");
  for (const Refusal& row : python_reads())
    EXPECT_HAS(text, "| `" + std::string(row.key) + "` | " + row.when + " | " + row.instead + " |\n")
        << "missing in docs/config_served.md";
  for (const Unread& row : unread()) {
    EXPECT_HAS(text, "| `" + std::string(row.key) + "` | " + row.instead + " |\n")
        << "missing in docs/config_served.md";
  }
}

TEST(Served, TheStateTableOfTheDocsIsUpToDate) {
  expect_table("state", state_table());
}

TEST(Served, WhatIsReadByNothingWarns) {
  const std::vector<std::pair<const char*, std::vector<std::string>>> rows{
      {R"({"data_parallel_size": 4, "zero_optimization": {"override_module_apply": false, "sub_group_size": 1e9}})",
       {"zero_optimization.override_module_apply", "data_parallel_size"}},
      {R"({"prescale_gradients": true, "zero_optimization": {"stage": 1, "allgather_bucket_size": 2e8}})",
       {"prescale_gradients", "zero_optimization.allgather_bucket_size"}},
      {R"({"sparse_gradients": true, "optimizer": {"type": "Adam", "legacy_fusion": true}})",
       {"optimizer.legacy_fusion", "sparse_gradients"}},
      {R"({"zero_optimization": {"contiguous_gradients": false, "compute_grad_norm": false,
           "offload_optimizer": {"device": "none", "fast_init": true}}})",
       {"zero_optimization.contiguous_gradients", "zero_optimization.compute_grad_norm",
        "zero_optimization.offload_optimizer.fast_init"}},
      {R"({"tensor_parallel": {"vocab_parallel_ce_backend": "liger", "keep_module_on_host": true}})",
       {"tensor_parallel.vocab_parallel_ce_backend", "tensor_parallel.keep_module_on_host"}},
      {R"({"checkpoint": {"writer": {"type": "fast"}, "checkpoint_serialization": false,
           "parallel_write": {"pipeline_stage": true}}})",
       {"checkpoint.parallel_write.pipeline_stage", "checkpoint.checkpoint_serialization", "checkpoint.writer"}},
      {R"({"activation_checkpointing": {"number_checkpoints": 4, "contiguous_memory_optimization": true}})",
       {"activation_checkpointing.contiguous_memory_optimization", "activation_checkpointing.number_checkpoints"}},
      {R"({"pipeline": {"pipe_partitioned": true, "use_reentrant": true}, "timers": {"throughput": {"enabled": true}}})",
       {"pipeline.use_reentrant", "pipeline.pipe_partitioned", "timers.throughput.enabled"}},
      {R"({"compile": {"free_activation": true, "passes": ["prefetch"], "double_buffer": true}})",
       {"compile.free_activation", "compile.passes"}},
      {R"({"compile": {"deepcompile": true}})", {}},  // refused
      {R"({"elasticity": {"min_time": 20}})", {"elasticity.min_time"}},
      // What is done anyway, as many files have it.
      {R"({"bf16": {"enabled": true, "immediate_grad_update": true}, "zero_optimization": {"stage": 2,
           "contiguous_gradients": true, "round_robin_gradients": true, "elastic_checkpoint": true, "reduce_scatter": true,
           "allgather_partitions": true, "allgather_bucket_size": 5e8, "overlap_comm": true, "reduce_bucket_size": 2e8,
           "offload_optimizer": {"device": "cpu", "pin_memory": true, "pipeline_read": true, "fast_init": false}}})",
       {}},
      {R"({"activation_checkpointing": {"partition_activations": false, "contiguous_memory_optimization": false,
           "number_checkpoints": null}, "timers": {"throughput": {"enabled": false, "synchronized": false}},
           "pipeline": {"pipe_partitioned": false, "grad_partitioned": false}, "optimizer": {"type": "Muon"},
           "zero_optimization": {"stage": 3, "reduce_scatter": false, "memory_efficient_linear": false}})",
       {}},
  };
  for (const auto& [json, keys] : rows) {
    const Config config = Config::from_json(json);
    ASSERT_EQ(config.warnings.size(), keys.size()) << json << "\n" << join(config.warnings, "\n");
    for (size_t i = 0; i < keys.size(); ++i)
      EXPECT_HAS(config.warnings[i], keys[i] + ": has no effect in this version; ");
  }
  EXPECT_EQ(Config::from_json(R"({"data_parallel_size": 4})").warnings[0],
            "data_parallel_size: has no effect in this version; the process group says how many ranks there are");
}

// "served" is said of what has no other row: a key that no source names is not.
TEST(Served, WhatIsServedHasAReader) {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  const std::set<std::string> tables{"keys.cpp",   "sections.h", "zero_section.h",
                                     "served.cpp", "config.h",   "_getters.py"};
  std::set<std::string> words;
  for (const char* folder : {"tessera", "python"})
    for (const auto& file : std::filesystem::recursive_directory_iterator(root / folder)) {
      const std::string type = file.path().extension().string();
      if (tables.contains(file.path().filename().string()) || (type != ".cpp" && type != ".h" && type != ".py"))
        continue;
      std::ifstream in(file.path());
      for (std::string line, word; std::getline(in, line); word.clear()) {
        if (line.find("= _key(") != std::string::npos) continue;  // shows it only
        for (const char c : line + " ") {
          if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_') {
            word += c;
          } else {
            words.insert(std::exchange(word, {}));
          }
        }
      }
    }
  ASSERT_GT(words.size(), 1000u);
  const std::string table = state_table();
  for (const Key& key : keys())
    for (const char* state : {"\n| served |", "\n| served from Python |"}) {
      const std::string row = table.substr(table.find(state) + 1);
      if (row.substr(0, row.find('\n')).find("`" + key.path + "`") == std::string::npos) continue;
      EXPECT_TRUE(words.contains(key.path.substr(key.path.rfind('.') + 1))) << key.path << " is read by nothing";
    }
}

TEST(Served, CppRefusesWhatOnlyPythonServes) {
  const Config asks =
      Config::from_json(R"({"wandb": {"enabled": true}, "comet": {"enabled": true}, "flops_profiler": {"enabled": true},
      "csv_monitor": {"enabled": true}, "comms_logger": {"enabled": true}})");
  check_served(asks);
  const std::string text = error_of<c10::NotImplementedError>([&] { check_cpp_serves(asks); });
  EXPECT_HAS(text, "only the Python front end serves");
  EXPECT_HAS(text, "wandb.enabled (true)");
  EXPECT_HAS(text, "comet.enabled (true)");
  EXPECT_EQ(text.find("flops_profiler"), std::string::npos) << text;
  EXPECT_EQ(text.find("csv_monitor"), std::string::npos) << text;
  EXPECT_EQ(text.find("comms_logger"), std::string::npos) << text;
  EXPECT_EQ(error_of<c10::NotImplementedError>(
                [] { check_cpp_serves(Config::from_json(R"({"checkpoint": {"format": "deepspeed"}})")); }),
            "");
}

TEST(Served, CppWarnsOfAllThatHasNoEffectThere) {
  const std::vector<std::pair<const char*, std::vector<std::string>>> rows{
      {R"({"steps_per_print": 5, "checkpoint": {"tag_validation": "fail", "load_universal": true}})", {}},
      {R"({"log_level": "info"})",
       {"log_level (any): has no effect in C++; warnings are torch's, lines go to standard error"}},
      {R"({"dataloader_drop_last": true})", {}},
      {R"({"activation_checkpointing": {"profile": true}})",
       {"activation_checkpointing.profile (true): has no effect in C++; times are those of wall_clock_breakdown, and "
        "of a "
        "profiler of torch"}},
      {R"({"tensor_parallel": {"dtype": "fp32", "vocab_parallel_lm_head": true, "tp_overlap_comm": true}})",
       {"tensor_parallel.dtype (any): has no effect in C++; slices have the dtype of the parameters, which the "
        "precision says"}},
      {R"({"nonsense": 1, "data_parallel_size": 2, "wall_clock_breakdown": true, "dump_state": true})",
       {"nonsense: unknown key, ignored",
        "data_parallel_size: has no effect in this version; the process group says how many ranks there are"}},
  };
  for (const auto& [json, lines] : rows)
    EXPECT_EQ(check_cpp_serves(Config::from_json(json)), lines) << json;
  Config by_hand;
  by_hand.unread.at("elasticity.min_time") = int64_t{20};
  EXPECT_EQ(check_cpp_serves(by_hand),
            (std::vector<std::string>{
                "elasticity.min_time: has no effect in this version; ranks come and go when the launcher says so"}));
}

TEST(Served, EveryRowNamesAKeyAndDefaultsAreServed) {
  for (const Unread& row : unread()) {
    const std::string key = row.key;
    const bool known =
        key.ends_with(".*") ? !names_in(key.substr(0, key.size() - 2)).empty() : find_key(key) != nullptr;
    EXPECT_TRUE(known) << key;
  }
  for (const auto& rows : {refusals(), python_only(), python_reads()}) {
    for (const Refusal& row : rows) {
      EXPECT_NE(find_key(row.key), nullptr) << row.key;
      EXPECT_FALSE(row.refused(Config{})) << row.key;
    }
  }
}

}  // namespace
}  // namespace tessera::config

#include "tessera/config/partition_rules.h"

#include <tuple>

#include "support.h"

namespace tessera::config {
namespace {

using parallel::Partition;

Config config_of(const std::string& section) {
  return Config::from_json(R"({"tensor_parallel": {"autotp_size": 2, )" + section + "}}");
}
PartitionRules rules_of(const std::string& section) {
  return *partition_rules(config_of(section), {}, 2, standard_patterns());
}
std::string specs(const std::string& list) {
  return R"("partition_config": {"layer_specs": [)" + list + "]}";
}

TEST(PartitionRules, Keys) {
  const PartitionRules rules = rules_of(R"("preset_model": "llama", "partition_config": {"strict_mode": true,
      "embedding_partition_dim": 0, "lm_head_patterns": "head", "tp_size": 2, "layer_specs": [
        {"patterns": ["a", "b"], "partition_type": "ROW", "shape": [2, -1, [3, 4]], "partition_dim": 2},
        {"patterns": "c", "model_types": ["Llama"], "gather_output": true},
        {"patterns": "d", "partition_type": "skip", "grad_allreduce": true}]})");
  EXPECT_EQ(rules.source, "partition_config");
  EXPECT_TRUE(rules.strict);
  EXPECT_EQ(rules.embedding_dim, 0);
  EXPECT_EQ(rules.head_names, std::vector<std::string>{"head"});
  ASSERT_EQ(rules.rules.size(), 4 + parallel::preset_rules("llama", {}, parallel::standard_matcher()).size());
  const auto& [a, b, c, d] = std::tie(rules.rules[0], rules.rules[1], rules.rules[2], rules.rules[3]);
  EXPECT_EQ(a.partition, Partition::Row);
  EXPECT_EQ(a.source, "tensor_parallel.partition_config.layer_specs[0]");
  EXPECT_EQ(a.shape->nested, 2);
  EXPECT_EQ(a.shape->entries, (std::vector<parallel::Sizes>{{2}, {-1}, {3, 4}}));
  EXPECT_TRUE(b.matches("b.weight") && !b.matches("a.weight"));
  EXPECT_EQ(c.partition, Partition::Column);
  EXPECT_EQ(c.model_types, std::vector<std::string>{"llama"});
  EXPECT_TRUE(c.gather_output);
  EXPECT_EQ(d.partition, Partition::Skip);
  EXPECT_TRUE(d.sum_gradient);
}

TEST(PartitionRules, Sources) {
  EXPECT_FALSE(partition_rules(config_of(R"("tp_overlap_comm": true)"), {}, 2, standard_patterns()));
  EXPECT_EQ(rules_of(R"("preset_model": "qwen2")").source, "preset qwen2");
  const std::string own = R"("layer_specs": [{"patterns": ["a"]}])";
  EXPECT_EQ(rules_of(R"("preset_model": "llama", "partition_config": {"use_default_specs": false, )" + own + "}")
                .rules.size(),
            1);
}

TEST(PartitionRules, WhatIsWrongIsNamed) {
  const auto wrong = [](const std::string& section) { return error_of([&] { rules_of(section); }); };
  const std::vector<std::pair<std::string, const char*>> rows{
      {R"("partition_config": [])", "partition_config: must be an object"},
      {R"("partition_config": {"layer_spec": []})",
       "partition_config.layer_spec: unknown key; did you mean \"layer_specs\"?"},
      {R"("partition_config": {})", "there is no rule"},
      {R"("partition_config": {"strict_mode": 1})", "strict_mode has the wrong type: 1"},
      {R"("partition_config": {"tp_size": 3})", "tp_size is 3; it must be 1 or tensor_parallel.autotp_size (2)"},
      {R"("partition_config": {"embedding_partition_dim": 2})", "embedding_partition_dim must be 0 or 1, got 2"},
      {specs("{}"), "layer_specs[0].patterns is empty"},
      {specs(R"({"patterns": ["("]})"), "layer_specs[0].patterns: '(' is no regular expression"},
      {specs(R"({"patterns": ["x"], "partition_type": "diagonal"})"), "must be one of column, row, skip"},
      {specs(R"({"patterns": ["x"], "kind": 1})"), "layer_specs[0].kind: unknown key; known are patterns"},
      {specs(R"({"patterns": ["x"], "shape": 3})"), "layer_specs[0].shape must be a list, got 3"},
      {specs(R"({"patterns": ["x"], "shape": [true, -1]})"), "no whole number"},
      {specs(R"({"patterns": ["x"], "shape": [[1, 2], [3, 4]]})"), "nested tuple only allowed at partition_dim"},
      {specs(R"({"patterns": ["x"], "gather_output": true, "partition_type": "row"})"), "is for partition_type column"},
  };
  for (const auto& [section, message] : rows)
    EXPECT_HAS(wrong(section), message);
  EXPECT_THROW(rules_of(specs(R"({"patterns": ["x"], "shape": [2, -1], "gather_output": true})")),
               c10::NotImplementedError);
}

TEST(PartitionRules, PlanOptions) {
  const Config config =
      config_of(R"("tp": {"tp_grain_size": 4}, "vocab_parallel_lm_head": true, "tp_overlap_comm": false)");
  const parallel::PlanOptions options = plan_options(config, 2, {});
  EXPECT_EQ(options.grain, 4);
  EXPECT_TRUE(options.vocab_parallel);
  EXPECT_EQ(options.head_names, (std::vector<std::string>{"lm_head", "embed_out"}));
  EXPECT_FALSE(overlaps_tensor_parallel(config));
  EXPECT_TRUE(overlaps_tensor_parallel(config_of(R"("preset_model": "llama")")));
}

}  // namespace
}  // namespace tessera::config

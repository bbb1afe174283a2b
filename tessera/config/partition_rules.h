// Turns the section tensor_parallel into the rules of a plan (parallel/plan.h).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/parallel/plan.h"

namespace tessera::config {

class Report;

struct PartitionRules {
  std::vector<parallel::Rule> rules;
  std::string source;  // "partition_config", "preset llama"
  bool strict = false;
  int embedding_dim = 1;
  std::vector<std::string> head_names = parallel::PlanOptions().head_names;
};

// Makes the predicate of a pattern; a value error that names `where`, a key, for a pattern that cannot be read.
using PatternMatcher = std::function<parallel::Predicate(const std::string& pattern, const std::string& where)>;
PatternMatcher standard_patterns();  // parallel::standard_matcher

// The rules of partition_config, with use_default_specs followed by preset_model's, else of preset_model alone; empty where
// the configuration names neither. `size`: ranks of the group. Value errors name the key; not-implemented error for
// gather_output with shape. Pure.
std::optional<PartitionRules> partition_rules(const Config& config, const parallel::ModelFacts& facts, int size,
                                              const PatternMatcher& matcher);

// Reports unknown keys of partition_config, and of its rules; they are errors whether or not a model is cut.
void check_partition_keys(const Config& config, Report& report);

// The options of a plan beside rules: size, grain, vocabulary.
parallel::PlanOptions plan_options(const Config& config, int size, PartitionRules rules);

// Whether the all-reduce of a column layer's backward runs under the product for its weight's gradient: unless tp_overlap_comm
// says no. Results are the same.
bool overlaps_tensor_parallel(const Config& config);

}  // namespace tessera::config

// Plan: which modules of a model are cut over a tensor-parallel group, how, and why. Pure: from a list of the model's modules,
// facts of the model and rules, to one decision a weight. Front ends make the list and carry the plan out.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/parallel/sizes.h"

namespace tessera::parallel {

// A module of the model, parents before children, children in the order of their registration: all of them, also those without
// a weight. A module with several weights (experts in one tensor) is there once for each of them, under its parameter's name.
struct Module {
  enum class Kind : uint8_t {
    Other,
    Linear,
    Conv1D /* weight is [in, out] */,
    Embedding,
    Norm,
    Experts /* 3-D */,
    List
  };
  std::string path;        // "model.layers.0.self_attn.q_proj"
  std::string class_name;  // without its Python module
  Kind kind = Kind::Other;
  Sizes weight_sizes;           // empty: no weight
  int64_t bias = 0;             // elements; 0: none
  int64_t weight_identity = 0;  // one number for one tensor: ties; 0: of its own
  std::string param = "weight";
  std::map<std::string, int64_t> attributes;  // integers of the names in width_names()
  int64_t params = 0;                         // parameters of its own
};

// What the model's configuration says; 0 and "" where it does not say.
struct ModelFacts {
  std::string model_type = {};
  int64_t heads = 0, kv_heads = 0, head_dim = 0, hidden = 0, vocabulary = 0;
  // Facts of parts of the model that have a configuration of their own (a vision tower), by the path of their module.
  std::map<std::string, ModelFacts> parts = {};
  const ModelFacts& of(const std::string& path) const;  // those of the innermost part around `path`
};

enum class Partition : uint8_t { Column, Row, Skip };
const char* partition_name(Partition partition);

struct Rule {
  std::function<bool(const std::string&)> matches;  // of "<path>.<param>", from its start
  std::string pattern;                              // for the report
  std::string source;                               // "partition_config.layer_specs[2]", "preset llama", "tp_plan"
  Partition partition = Partition::Column;
  std::optional<PackedShape> shape;
  std::vector<std::string> model_types;  // empty: all
  bool gather_output = false;
  bool sum_gradient = false;  // Skip: whole, gradients summed over the group
};

// The first rule whose pattern matches; null without any. Matches parameters of no module's, too: Skip leaves these.
const Rule* first_match(const std::vector<Rule>& rules, const std::string& name);
// Which of these parameters rules leave whole (Skip), and of which of them they sum the gradients.
struct LeftWhole {
  std::vector<std::string> names, summed;
};
LeftWhole left_whole(const std::vector<Rule>& rules, const std::vector<std::string>& names);

struct PlanOptions {
  int size = 1;             // ranks of the group
  std::vector<Rule> rules;  // the first match wins; empty: heuristics
  bool strict = false;      // a Linear that no rule names is a value error
  int64_t grain = 1;
  int64_t expert_grain =
      1;                  // of the inner width of experts in one tensor: a value error where a rank would get another
  int embedding_dim = 1;  // along which a matched embedding is cut
  std::vector<std::string> head_names{"lm_head", "embed_out"};
  bool vocab_parallel = false;  // cut embedding and head over the vocabulary
};

struct Decision {
  std::string path, param = "weight";
  Partition partition = Partition::Skip;
  int64_t dim = 0;             // of the weight
  int64_t total = 0;           // the weight's size along dim
  std::vector<Ranges> ranges;  // [rank], of that dim, joined in order; the bias of a column layer is cut alike
  bool gather_output = false;
  bool sum_gradient = false;
  // Skip: outputs that every rank uses for its own heads (the shared key of multi-head latent attention): a front end lets
  // this part of the output, and no other, pass copy_to_ranks.
  shard::Range own_use;
  // Column: the last outputs are for every rank's heads (the one key and value of multi-query attention). Each rank has a part of
  // them, of these sizes; a front end gathers them (gather_for_use). Empty: none.
  Sizes tail;
  bool vocabulary = false;  // rows are the vocabulary: embedding or head
  std::string rule;         // source and pattern of the rule that took it

  Sizes sizes() const;      // [rank]
  Sizes own_sizes() const;  // [rank], without the tail
};

struct Plan {
  int size = 1;
  std::vector<Decision> decisions;  // of weights that are cut or need something of the front end, in the model's order
  std::vector<std::string> whole;   // modules with a weight that stay whole
  std::vector<std::string> warnings;  // each once
  std::vector<std::string> notes;     // lines of text() on what a front end does beside the decisions
  // Attributes of attention modules that describe a width, and their value on each rank: path -> {"num_heads" -> {4, 4}}.
  std::map<std::string, std::map<std::string, Sizes>> widths;

  const Decision* find(const std::string& path, const std::string& param = "weight") const;
  // The plan as a table: paths with numbers collapsed to *, how, sizes by rank, rule.
  std::string text() const;
};

// Makes a plan. Value errors name module, numbers and key: heads that cannot be dealt out, a shape that does not fit, nothing
// that matches, strict mode; models that heuristics refuse (deberta, flaubert, fsmt, gpt2, led, longformer, xlm, xlnet, ...) with
// the reason. Not-implemented error: gather_output of a rule with a shape.
Plan make_plan(const std::vector<Module>& modules, const ModelFacts& facts, const PlanOptions& options);

// Names of integer attributes that describe the width of an attention module.
const std::vector<std::string>& width_names();

// ---- presets.cpp
using Predicate = std::function<bool(const std::string&)>;
// Makes a rule's predicate from its regular expression, which is matched from the start.
using Matcher = std::function<Predicate(const std::string& pattern)>;
// Matches by std::regex (ECMAScript); value error, which names `where`, for a pattern that std::regex cannot read.
Matcher standard_matcher(const std::string& where = "partition rule");

// The presets as rules, in any case of letters; value error with the names for an unknown one. Sizes of packed weights follow
// `facts` where they are known (Phi-3 and ChatGLM with fewer key/value heads).
std::vector<Rule> preset_rules(const std::string& name, const ModelFacts& facts, const Matcher& matcher);
std::vector<std::string> preset_names();
// Rules of a Llama with query, key and value in one qkv_proj.
std::vector<Rule> llama_gqa_rules(int64_t heads, int64_t kv_heads, int64_t head_dim, const Matcher& matcher);

}  // namespace tessera::parallel

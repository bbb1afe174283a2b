// The presets as tables of regular expressions. Experts are named in both spellings of Transformers: modules in a list (4.x) and
// weights of all experts in one tensor (5.x).
#include <algorithm>
#include <regex>

#include <c10/util/ArrayRef.h>

#include "tessera/base/error.h"
#include "tessera/parallel/cutting.h"

namespace tessera::parallel {
namespace {

enum class Pack : uint8_t { No, Qkv, Halves };

struct Row {
  Partition partition;
  const char* pattern;
  Pack pack = Pack::No;
};
struct Preset {
  const char* name;
  std::vector<Row> rows;
};

constexpr Partition kColumn = Partition::Column, kRow = Partition::Row, kSkip = Partition::Skip;

const std::vector<Preset>& presets() {
  static const std::vector<Row> separate{
      {kRow, R"(.*\.self_attn\.o_proj\.weight$)"},
      {kColumn, R"(.*\.self_attn\.[qkv]_proj\.weight$)"},
  };
  static const std::vector<Row> mlp{
      {kRow, R"(.*\.mlp\.down_proj\.weight$)"},
      {kColumn, R"(.*\.mlp\.(up|gate)_proj\.weight$)"},
  };
  static const std::vector<Row> experts{
      {kRow, R"(.*\.mlp\.experts\.\d+\.down_proj\.weight$)"},
      {kColumn, R"(.*\.mlp\.experts\.\d+\.(up|gate)_proj\.weight$)"},
      {kRow, R"(.*\.experts\.down_proj$)"},
      {kColumn, R"(.*\.experts\.gate_up_proj$)"},
      {kRow, R"(.*\.mlp\.shared_experts?\.down_proj\.weight$)"},
      {kColumn, R"(.*\.mlp\.shared_experts?\.(up|gate)_proj\.weight$)"},
      {kSkip, R"(.*\.mlp\.(gate|shared_expert_gate)\.weight$)"},
  };
  const auto joined = [](std::vector<std::vector<Row>> parts) {
    std::vector<Row> rows;
    for (const auto& part : parts)
      rows.insert(rows.end(), part.begin(), part.end());
    return rows;
  };
  static const std::vector<Preset> all{
      {"bloom",
       {{kRow, R"(.*\.self_attention\.dense\.weight$)"},
        {kColumn, R"(.*\.self_attention\.query_key_value\.weight$)"},  // by heads, each with its query, key and value
        {kRow, R"(.*\.mlp\.dense_4h_to_h\.weight$)"},
        {kColumn, R"(.*\.mlp\.dense_h_to_4h\.weight$)"}}},
      {"chatglm",
       {{kRow, R"(.*\.self_attention\.dense\.weight$)"},
        {kColumn, R"(.*\.self_attention\.query_key_value\.weight$)", Pack::Qkv},
        {kRow, R"(.*\.mlp\.dense_4h_to_h\.weight$)"},
        {kColumn, R"(.*\.mlp\.dense_h_to_4h\.weight$)", Pack::Halves}}},
      {"deepseek_v2", joined({{{kRow, R"(.*\.self_attn\.o_proj\.weight$)"},
                               {kColumn, R"(.*\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.weight$)"},
                               {kSkip, R"(.*\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight$)"}},
                              experts,
                              mlp})},
      {"llama", joined({separate, mlp})},
      {"mixtral", joined({separate,
                          {{kRow, R"(.*\.block_sparse_moe\.experts\.\d+\.w2\.weight$)"},
                           {kColumn, R"(.*\.block_sparse_moe\.experts\.\d+\.w[13]\.weight$)"},
                           {kRow, R"(.*\.experts\.down_proj$)"},
                           {kColumn, R"(.*\.experts\.gate_up_proj$)"},
                           {kSkip, R"(.*\.(block_sparse_moe|mlp)\.gate\.weight$)"}}})},
      {"phi3",
       {{kRow, R"(.*\.self_attn\.o_proj\.weight$)"},
        {kColumn, R"(.*\.self_attn\.qkv_proj\.weight$)", Pack::Qkv},
        {kRow, R"(.*\.mlp\.down_proj\.weight$)"},
        {kColumn, R"(.*\.mlp\.gate_up_proj\.weight$)", Pack::Halves}}},
      {"qwen2", joined({separate, experts, mlp})},
  };
  return all;
}

std::optional<PackedShape> shape_of(Pack pack, const ModelFacts& facts) {
  PackedShape shape;
  shape.entries = {{pack == Pack::Qkv ? 3 : 2}, {-1}};
  if (pack == Pack::No) return std::nullopt;
  const int64_t head_dim = facts.head_dim > 0 || facts.heads == 0 ? facts.head_dim : facts.hidden / facts.heads;
  const int64_t kv_heads = facts.kv_heads > 0 ? facts.kv_heads : facts.heads;
  if (pack == Pack::Qkv && head_dim > 0 && facts.heads > 0) {
    shape.entries[0] = {facts.heads * head_dim, kv_heads * head_dim, kv_heads * head_dim};
    shape.nested = 0;
  }
  return shape;
}

}  // namespace

Matcher standard_matcher(const std::string& where) {
  return [where](const std::string& pattern) -> Predicate {
    try {
      return [expression = std::regex(pattern)](const std::string& text) {
        return std::regex_search(text, expression, std::regex_constants::match_continuous);
      };
    } catch (const std::regex_error& error) {
      TESSERA_CHECK_VALUE(false, "parallel", where, ": '", pattern, "' is no regular expression: ", error.what());
    }
  };
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets())
    names.emplace_back(preset.name);
  return names;
}

std::vector<Rule> preset_rules(const std::string& name, const ModelFacts& facts, const Matcher& matcher) {
  const auto& all = presets();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Preset& p) { return p.name == lower(name); });
  TESSERA_CHECK_VALUE(found != all.end(), "parallel", "preset_model '", name, "' is none of ",
                      c10::ArrayRef<std::string>(preset_names()));
  std::vector<Rule> rules;
  for (const Row& row : found->rows) {
    Rule rule;
    rule.matches = matcher(row.pattern);
    rule.pattern = row.pattern;
    rule.source = std::string("preset ") + found->name;
    rule.partition = row.partition;
    rule.shape = shape_of(row.pack, facts);
    rules.push_back(std::move(rule));
  }
  return rules;
}

std::vector<Rule> llama_gqa_rules(int64_t heads, int64_t kv_heads, int64_t head_dim, const Matcher& matcher) {
  ModelFacts facts;
  facts.heads = heads;
  facts.kv_heads = kv_heads;
  facts.head_dim = head_dim;
  std::vector<Rule> rules = preset_rules("llama", facts, matcher);
  Rule& qkv = rules[1];
  qkv.pattern = R"(.*\.self_attn\.qkv_proj\.weight$)";
  qkv.matches = matcher(qkv.pattern);
  qkv.shape = shape_of(Pack::Qkv, facts);
  for (Rule& rule : rules)
    rule.source = "preset llama_gqa";
  return rules;
}

}  // namespace tessera::parallel

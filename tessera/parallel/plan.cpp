#include "tessera/parallel/plan.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/parallel/cutting.h"

namespace tessera::parallel {

const char* partition_name(Partition partition) {
  switch (partition) {
    case Partition::Column:
      return "column";
    case Partition::Row:
      return "row";
    default:
      return "skip";
  }
}

const std::vector<std::string>& width_names() {
  static const std::vector<std::string> names{"n_heads",
                                              "inner_dim",
                                              "num_heads",
                                              "num_kv",
                                              "num_attention_heads",
                                              "num_attn_heads",
                                              "all_head_size",
                                              "embed_dim",
                                              "hidden_size",
                                              "num_key_value_heads",
                                              "num_kv_heads",
                                              "kv_n_heads",
                                              "d_model",
                                              "split_size",
                                              "num_attention_heads_per_partition",
                                              "num_multi_query_groups_per_partition",
                                              "num_key_value_groups",
                                              "hidden_size_per_partition"};
  return names;
}

Sizes Decision::sizes() const {
  Sizes result;
  for (const Ranges& mine : ranges)
    result.push_back(std::accumulate(mine.begin(), mine.end(), int64_t{0},
                                     [](int64_t sum, const shard::Range& range) { return sum + range.size(); }));
  return result;
}

Sizes Decision::own_sizes() const {
  Sizes result = sizes();
  for (size_t r = 0; r < tail.size(); ++r)
    result[r] -= tail[r];
  return result;
}

const Rule* first_match(const std::vector<Rule>& rules, const std::string& name) {
  const auto found = std::ranges::find_if(rules, [&](const Rule& rule) { return rule.matches(name); });
  return found == rules.end() ? nullptr : &*found;
}

LeftWhole left_whole(const std::vector<Rule>& rules, const std::vector<std::string>& names) {
  LeftWhole left;
  for (const std::string& name : names) {
    const Rule* const rule = first_match(rules, name);
    if (rule == nullptr || rule->partition != Partition::Skip) continue;
    left.names.push_back(name);
    if (rule->sum_gradient) left.summed.push_back(name);
  }
  return left;
}

const Decision* Plan::find(const std::string& path, const std::string& param) const {
  const auto found =
      std::ranges::find_if(decisions, [&](const Decision& d) { return d.path == path && d.param == param; });
  return found == decisions.end() ? nullptr : &*found;
}

namespace {

// The model type by the class of the first block, where there is no configuration: "LlamaDecoderLayer" -> "llama".
std::string model_type_of(const PlanBuilder& builder) {
  if (!builder.facts().model_type.empty()) return lower(builder.facts().model_type);
  for (const Module& m : builder.modules()) {
    if (builder.block_of(m.path) != m.path) continue;
    for (const char* ending : {"DecoderLayer", "Block", "Layer"}) {
      const size_t at = m.class_name.find(ending);
      if (at != std::string::npos && at > 0) return lower(m.class_name.substr(0, at));
    }
  }
  return "";
}

bool applies(const Rule& rule, const std::string& name, const std::string& model_type) {
  const auto same = [&](const std::string& type) { return !model_type.empty() && lower(type) == model_type; };
  return (rule.model_types.empty() || std::ranges::any_of(rule.model_types, same)) && rule.matches(name);
}

bool is_linear(const Module& m) {
  return m.kind == Module::Kind::Linear || m.kind == Module::Kind::Conv1D;
}

// Decides about a module that a rule other than skip took.
void cut_by_rule(PlanBuilder& builder, const Module& m, const Rule& rule, const std::string& name,
                 const std::string& why) {
  TESSERA_CHECK_BUILT(!rule.gather_output || !rule.shape, "parallel", name,
                      ": gather_output of a layer with a 'shape' (", why, ")");
  TESSERA_CHECK_VALUE(!rule.gather_output || rule.partition == Partition::Column, "parallel", name,
                      ": gather_output is for column layers, this one is ", partition_name(rule.partition), " (", why,
                      ")");
  if (m.kind == Module::Kind::Experts) {
    builder.cut_experts(m, rule.partition, why);
    return;
  }
  if (m.kind == Module::Kind::Embedding) {
    // A row of an embedding is a token; columns of what blocks look up belong to heads.
    const int64_t dim = rule.partition == Partition::Row ? 0 : builder.options().embedding_dim;
    TESSERA_CHECK_VALUE(dim == 0 || dim == 1, "parallel", name, ": embedding_partition_dim ", dim, "; it is 0 or 1");
    Decision& decision = builder.cut(m, Partition::Column, dim, why);
    decision.vocabulary = dim == 0;
    decision.gather_output = dim == 1 && (rule.gather_output || builder.block_of(m.path).empty());
    return;
  }
  const bool turned = m.kind == Module::Kind::Conv1D;
  const int64_t dim = (rule.partition == Partition::Column) == turned ? 1 : 0;
  Decision* decision = nullptr;
  if (rule.shape) {
    Sizes weight = m.weight_sizes;
    if (turned) std::swap(weight[0], weight[1]);
    const SubParams subs = resolve(*rule.shape, weight, name + " (" + why + ")");
    TESSERA_CHECK_VALUE(subs.dim == (rule.partition == Partition::Column ? 0 : 1), "parallel", name, ": a ",
                        partition_name(rule.partition), " layer cannot be cut along dim ", subs.dim, " of its weight (",
                        why, ")");
    std::vector<SizeRule> rules;
    for (const int64_t sub : subs.sizes) {
      rules.push_back(builder.size_rule(m, sub));
      if (rules.back().heads == 0) rules.back().grain = std::lcm(rules.back().grain, subs.unit);
    }
    decision = &builder.cut(m, rule.partition, dim, why, subs.sizes, rules);
  } else {
    decision = &builder.cut(m, rule.partition, dim, why);
  }
  decision->gather_output = rule.gather_output;
  decision->vocabulary = rule.partition == Partition::Column && builder.is_head(m.path);
}

// Names of layers that hold several projections; models in which these lie head by head.
constexpr std::array kSeveral{"qkv", "query_key_value", "c_attn", "w_pack", "gate_up", "up_gate"};
constexpr std::array kHeadByHead{"bloom",     "gpt_neox", "gpt_neox_japanese", "falcon",
                                 "persimmon", "fuyu",     "gpt_bigcode"};

// Whether a rule of the user's takes a layer for one whose name says that it holds several projections.
bool cut_as_one(const Decision& d, const Rule& rule) {
  if (d.partition != Partition::Column || d.gather_output || rule.shape || !rule.source.starts_with("tensor_parallel."))
    return false;
  const std::string name = lower(last_of(d.path));
  return std::ranges::any_of(kSeveral, [&](const char* part) { return name.find(part) != name.npos; });
}

}  // namespace

void follow_rules(PlanBuilder& builder) {
  const std::string model_type = model_type_of(builder);
  const bool head_by_head = std::ranges::find(kHeadByHead, lower(builder.facts().model_type)) != kHeadByHead.end();
  bool matched = false;
  for (const Module& m : builder.modules()) {
    if (m.weight_sizes.empty()) continue;
    const std::string name = m.path + "." + m.param;
    const Rule* first = nullptr;
    for (const Rule& rule : builder.options().rules) {
      if (!applies(rule, name, model_type)) continue;
      if (first == nullptr)
        first = &rule;
      else if (rule.source != first->source)
        builder.warn(c10::str("several rules match one module, the first one holds: ", name, " is matched by ",
                              first->source, " ('", first->pattern, "') and ", rule.source, " ('", rule.pattern, "')"));
    }
    if (first == nullptr) {
      TESSERA_CHECK_VALUE(!builder.options().strict || !is_linear(m), "parallel", "No matching spec for '", name,
                          "', and partition_config.strict_mode asks for one for every linear layer");
      continue;
    }
    const std::string why = first->source + ": " + first->pattern;
    if (first->partition == Partition::Skip) {
      matched = true;
      builder.note_skipped();
      if (first->sum_gradient) builder.add(m, why).sum_gradient = true;
    } else if (m.weight_sizes.size() >= 2) {
      matched = true;
      cut_by_rule(builder, m, *first, name, why);
      const Decision* decision = builder.decided(m);
      if (m.param == "weight" && !head_by_head && cut_as_one(*decision, *first)) builder.note_fused(why, m.path);
    }
  }
  TESSERA_CHECK_VALUE(matched, "parallel", "no rule for tensor parallelism matches a module of this model (",
                      builder.options().rules.size(), " rules of ", builder.options().rules[0].source,
                      " and others, as '", builder.options().rules[0].pattern, "'; names are of the form '",
                      builder.modules().empty() ? "" : builder.modules().back().path,
                      ".weight'); give others in tensor_parallel.partition_config or another preset_model");
}

Plan make_plan(const std::vector<Module>& modules, const ModelFacts& facts, const PlanOptions& options) {
  TESSERA_CHECK_VALUE(options.size >= 1 && options.grain >= 1, "parallel", "a plan for ", options.size,
                      " ranks in grains of ", options.grain,
                      " (tensor_parallel.autotp_size, tensor_parallel.tp.tp_grain_size)");
  PlanBuilder builder(modules, facts, options);
  if (options.rules.empty())
    follow_heuristics(builder);
  else
    follow_rules(builder);
  return builder.finish();
}

// ---- report

namespace {

std::string collapsed(const std::string& path) {
  std::string result;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string part = path.substr(begin, end - begin);
    const bool number =
        !part.empty() && std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c) != 0; });
    result += (begin > 0 ? "." : "") + (number ? "*" : part);
    begin = end + 1;
  }
  return result;
}

std::string sum_text(const Sizes& sizes) {
  std::string text;
  for (const int64_t size : sizes)
    text += c10::str(text.empty() ? "" : " + ", size);
  return text;
}

std::string what(const Decision& d) {
  if (d.partition == Partition::Skip)
    return d.sum_gradient ? "whole, gradients summed"
                          : c10::str("whole, own use of ", d.own_use.begin, " to ", d.own_use.end);
  const Sizes sizes = d.sizes();
  const bool even = std::ranges::all_of(sizes, [&](int64_t size) { return size == sizes[0]; });
  std::string text = c10::str(d.vocabulary ? "vocabulary" : partition_name(d.partition), " ", d.total, " = ",
                              even ? c10::str(sizes.size(), " x ", sizes[0]) : sum_text(sizes));
  if (d.ranges[0].size() > 1) text += c10::str(" in ", d.ranges[0].size(), " pieces");
  if (!d.tail.empty()) text += c10::str(", the last ", d.total - sum_of(d.own_sizes()), " gathered");
  return text + (d.gather_output ? ", gathered" : "");
}

// Merges lines that differ in the numbers of their paths only, in the order of the first.
class Lines {
 public:
  void add(const std::string& path, const std::string& text) {
    const auto [found, fresh] = places_.try_emplace({collapsed(path), text}, lines_.size());
    if (fresh) lines_.push_back({path, text, 0});
    ++lines_[found->second].count;
  }
  std::string str() const {
    size_t width = 0;
    const auto name = [](const Line& line) {
      return line.count == 1 ? line.path : c10::str(collapsed(line.path), "  x ", line.count);
    };
    for (const Line& line : lines_)
      width = std::max(width, name(line).size());
    std::string result;
    for (const Line& line : lines_) {
      const std::string left = name(line);
      result += "  " + left + (line.text.empty() ? "" : std::string(width - left.size() + 2, ' ') + line.text) + "\n";
    }
    return result;
  }

 private:
  struct Line {
    std::string path, text;
    int64_t count;
  };
  std::vector<Line> lines_;
  std::map<std::pair<std::string, std::string>, size_t> places_;
};

}  // namespace

std::string Plan::text() const {
  Lines cut, rest;
  for (const Decision& d : decisions)
    cut.add(d.param == "weight" ? d.path : d.path + "." + d.param, what(d) + "  [" + d.rule + "]");
  for (const std::string& path : whole)
    rest.add(path, "");
  std::string result =
      c10::str("tensor parallel plan for ", size, " ranks: ", decisions.size(), " weights\n", cut.str());
  if (!whole.empty()) result += "whole on every rank:\n" + rest.str();
  for (const std::string& note : notes)
    result += note + "\n";
  for (const std::string& warning : warnings)
    result += "warning: " + warning + "\n";
  return result;
}

}  // namespace tessera::parallel

#include "tessera/parallel/cutting.h"

#include <algorithm>
#include <cctype>
#include <numeric>

#include <c10/util/ArrayRef.h>

#include "tessera/base/error.h"
#include "tessera/comm/group.h"

namespace tessera::parallel {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::string last_of(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

bool is_inside(const std::string& path, const std::string& ancestor) {
  return ancestor.empty() || path == ancestor ||
         (path.size() > ancestor.size() && path.starts_with(ancestor) && path[ancestor.size()] == '.');
}

std::string attention_around(const std::string& path) {
  std::string found;
  for (std::string at = path; !at.empty(); at = parent_of(at)) {
    const std::string name = lower(last_of(at));
    if (name.find("attn") != name.npos || name.find("attention") != name.npos) found = at;
  }
  return found;
}

const ModelFacts& ModelFacts::of(const std::string& path) const {
  const ModelFacts* found = this;
  size_t length = 0;
  for (const auto& [part, facts] : parts) {
    if (!is_inside(path, part) || part.size() < length) continue;
    found = &facts;
    length = part.size();
  }
  return *found;
}

namespace {
std::string key_of(const std::string& path, const std::string& param) {
  return path + "." + param;
}
}  // namespace

void check_embedding(const std::string& path, bool max_norm, bool scale_grad_by_freq, bool sparse,
                     const std::string& rule) {
  std::vector<std::string> given;
  if (max_norm) given.emplace_back("max_norm");
  if (scale_grad_by_freq) given.emplace_back("scale_grad_by_freq");
  if (sparse) given.emplace_back("sparse");
  TESSERA_CHECK_VALUE(given.empty(), "tensor_parallel", path, ": an embedding with ", c10::Join(", ", given),
                      " cannot be cut (", rule, ")");
}

void check_matrix(const std::string& path, int64_t dims, const std::string& rule) {
  TESSERA_CHECK_VALUE(dims == 2, "tensor_parallel", path, ": a weight of ", dims, " dims cannot be cut (", rule, ")");
}

void check_bias(const std::string& path, at::IntArrayRef sizes, int64_t outputs) {
  TESSERA_CHECK_VALUE(sizes.size() == 1 && sizes[0] == outputs, "tensor_parallel", path, ": its bias of ", sizes,
                      " does not fit the ", outputs, " outputs of its weight");
}

void check_same_ranks(int rank, int size, const comm::Group& group) {
  TESSERA_CHECK_VALUE(rank == group.rank() && size == group.size(), "tensor_parallel",
                      "the model is cut already, as rank ", rank, " of ", size, "; here is rank ", group.rank(), " of ",
                      group.size(), ": use the mesh that it was cut for, or build it anew");
}

PlanBuilder::PlanBuilder(const std::vector<Module>& modules, const ModelFacts& facts, const PlanOptions& options)
    : modules_(modules), facts_(facts), options_(options) {
  std::set<std::string> lists;
  for (size_t i = 0; i < modules.size(); ++i) {
    const Module& m = modules[i];
    places_.emplace(key_of(m.path, m.param), i);
    children_[parent_of(m.path)].push_back(i);
    if (m.kind == Module::Kind::List) lists.insert(m.path);
    if (lists.contains(parent_of(m.path)) && block_of(m.path).empty()) blocks_.insert(m.path);
  }
}

const Module* PlanBuilder::find(const std::string& path, const std::string& param) const {
  const auto found = places_.find(key_of(path, param));
  return found == places_.end() ? nullptr : &modules_[found->second];
}

bool PlanBuilder::is_head(const std::string& path) const {
  const std::string name = last_of(path);
  return std::ranges::any_of(options_.head_names,
                             [&](const std::string& head) { return name == head || path == head; });
}

std::string PlanBuilder::block_of(const std::string& path) const {
  for (std::string at = path; !at.empty(); at = parent_of(at))
    if (blocks_.contains(at)) return at;
  return "";
}

int64_t PlanBuilder::heads_of(const std::string& path) const {
  for (std::string at = path; !at.empty(); at = parent_of(at))
    if (const auto found = heads_.find(at); found != heads_.end()) return found->second;
  const ModelFacts& facts = facts_.of(path);
  return facts.kv_heads > 0 ? facts.kv_heads : facts.heads;
}

SizeRule PlanBuilder::size_rule(const Module& module, int64_t total) const {
  if (is_head(module.path)) return {0, options_.grain};
  const int64_t heads = heads_of(module.path);
  const SizeRule rule = rule_for(module.path, total, heads, options_.grain);
  const bool by_heads =
      rule_for(module.path, heads, heads).heads > 0 && !attention_around(parent_of(module.path)).empty();
  TESSERA_CHECK_VALUE(heads == 0 || rule.heads > 0 || !by_heads, "parallel", module.path, ": ", total,
                      " elements are not ", heads,
                      " whole heads (the key/value heads of the model's configuration); give it a rule with 'shape' in "
                      "partition_config.layer_specs, or leave it out with partition_type \"skip\"");
  return rule;
}

Decision& PlanBuilder::cut(const Module& module, Partition partition, int64_t dim, const std::string& rule, Sizes subs,
                           std::vector<SizeRule> rules) {
  const int64_t total = module.weight_sizes[dim];
  if (subs.empty()) subs = {total};
  if (rules.empty())
    for (const int64_t sub : subs)
      rules.push_back(size_rule(module, sub));
  if (module.kind == Module::Kind::Linear || module.kind == Module::Kind::Conv1D) {
    const int64_t outputs = module.weight_sizes[module.kind == Module::Kind::Conv1D ? 1 : 0];
    TESSERA_CHECK_VALUE(module.bias == 0 || module.bias == outputs, "parallel", module.path, ": a bias of ",
                        module.bias, " elements does not fit ", outputs, " outputs");
  }
  Decision& decision = decisions_[number(module)] = {};
  decision.path = module.path;
  decision.param = module.param;
  decision.partition = partition;
  decision.dim = dim;
  decision.total = total;
  decision.ranges = packed_ranges(subs, options_.size, rules);
  decision.rule = rule;
  const Sizes sizes = decision.sizes();
  if (const auto idle = std::count(sizes.begin(), sizes.end(), 0); idle > 0)
    warn(c10::str("there are more ranks than heads or grains to deal out: ", idle, " of ", options_.size,
                  " ranks hold nothing of ", module.path, " and of other modules like it"));
  return decision;
}

Decision& PlanBuilder::cut_experts(const Module& module, Partition partition, const std::string& rule) {
  const Module *up = find(module.path, "gate_up_proj"), *down = find(module.path, "down_proj");
  TESSERA_CHECK_VALUE(up != nullptr && down != nullptr && (&module == up) == (partition == Partition::Column) &&
                          (&module == down) == (partition == Partition::Row),
                      "parallel", module.path, ".", module.param,
                      ": weights of experts in one tensor are cut as gate_up_proj "
                      "(column) and down_proj (row), this is ",
                      partition_name(partition));
  const Sizes &wide = up->weight_sizes, &narrow = down->weight_sizes;
  // Weights are [experts, 2 inner, hidden] and [experts, hidden, inner], or both the other way round.
  const bool plain = wide[1] == 2 * narrow[2] && wide[2] == narrow[1];
  TESSERA_CHECK_VALUE(plain || (wide[2] == 2 * narrow[1] && wide[1] == narrow[2]), "parallel", module.path,
                      ": gate_up_proj of ", c10::IntArrayRef(wide), " and down_proj of ", c10::IntArrayRef(narrow),
                      " do not fit");
  const int64_t inner = plain ? narrow[2] : narrow[1];
  const SizeRule size{0, std::lcm(options_.grain, options_.expert_grain)};
  TESSERA_CHECK_VALUE(
      options_.size == 1 || options_.expert_grain == 1 ||
          (inner % options_.expert_grain == 0 && inner / size.grain >= options_.size),
      "parallel", module.path, ": experts of an inner width of ", inner, " cannot be dealt out to ", options_.size,
      " ranks in multiples of ", size.grain,
      ": torch's grouped product, which the model's configuration asks for, takes rows of whole 16 bytes (",
      options_.expert_grain,
      " elements); use fewer ranks (tensor_parallel.autotp_size), a smaller tp.tp_grain_size, or other "
      "products (model.set_experts_implementation(\"eager\"))");
  // Experts with biases (gpt-oss) have gate and up one element after the other: pairs stay together.
  if (&module == up && up->bias > 0)
    return cut(module, partition, plain ? 1 : 2, rule, {2 * inner}, {{0, 2 * size.grain}});
  if (&module == up) return cut(module, partition, plain ? 1 : 2, rule, {inner, inner}, {size});
  return cut(module, partition, plain ? 2 : 1, rule, {inner}, {size});
}

Decision& PlanBuilder::add(const Module& module, const std::string& rule) {
  Decision& decision = decisions_[number(module)];
  if (!decision.path.empty()) return decision;
  decision.path = module.path;
  decision.param = module.param;
  decision.rule = rule;
  return decision;
}

const Decision* PlanBuilder::decided(const Module& module) const {
  const auto found = decisions_.find(number(module));
  return found == decisions_.end() ? nullptr : &found->second;
}

void PlanBuilder::drop(const Module& module) {
  decisions_.erase(number(module));
}

void PlanBuilder::warn(const std::string& text) {
  // One warning of a kind is kept: others differ in the module's name.
  const auto kind = [](const std::string& t) { return t.substr(0, t.find(':')); };
  if (std::ranges::none_of(warnings_, [&](const std::string& other) { return kind(other) == kind(text); }))
    warnings_.push_back(text);
}

// Marks norms of single heads, between a column layer and its row layer: each rank sees its own heads only.
void PlanBuilder::share_norms() {
  static const std::set<std::string> kNames{"q_norm",   "k_norm",          "q_layernorm",   "k_layernorm", "query_norm",
                                            "key_norm", "query_layernorm", "key_layernorm", "q_ln",        "k_ln"};
  for (const Module& m : modules_) {
    if (m.kind != Module::Kind::Norm || !kNames.contains(last_of(m.path)) || m.weight_sizes.empty()) continue;
    const Decision* column = column_in(parent_of(m.path));
    if (column == nullptr || decided(m) != nullptr) continue;
    const int64_t size = m.weight_sizes.back();
    const ModelFacts& facts = facts_.of(m.path);
    const bool whole =
        facts.head_dim > 0 ? size != facts.head_dim : m.weight_sizes.size() == 1 && size >= column->total;
    TESSERA_CHECK_VALUE(!whole && m.weight_sizes.size() == 1, "parallel", m.path, ": a norm over ", size,
                        " elements takes all heads together, which lie on several ranks once ", column->path,
                        " is cut; such models cannot be cut along their heads");
    add(m, "norm of each head").sum_gradient = true;
  }
}

// Multi-head latent attention: all heads share the rotary part of the key, so each rank has a part of its gradient.
void PlanBuilder::share_keys() {
  for (const Module& m : modules_) {
    if (last_of(m.path) != "kv_a_proj_with_mqa" || decided(m) != nullptr) continue;
    const Module* up = find(parent_of(m.path) + ".kv_b_proj");
    if (up == nullptr || decided(*up) == nullptr) continue;
    const int64_t latent = up->weight_sizes[1], outputs = m.weight_sizes[0];
    TESSERA_CHECK_VALUE(latent < outputs, "parallel", m.path, ": ", outputs, " outputs hold no key beside a latent of ",
                        latent);
    add(m, "key that heads share").own_use = {latent, outputs};
  }
}

void PlanBuilder::cut_vocabulary() {
  if (!options_.vocab_parallel) return;
  int64_t rows = facts_.vocabulary;
  const std::string rule = "tessera.vocab_parallel";
  for (const Module& m : modules_) {
    if (m.kind != Module::Kind::Linear || !is_head(m.path) || decided(m) != nullptr) continue;
    Decision& decision = cut(m, Partition::Column, 0, rule);
    decision.vocabulary = decision.gather_output = true;
    rows = rows > 0 ? rows : decision.total;
  }
  for (const Module& m : modules_) {
    if (m.kind != Module::Kind::Embedding || !block_of(m.path).empty() || decided(m) != nullptr) continue;
    if (m.weight_sizes[0] == rows) cut(m, Partition::Column, 0, rule, {}, {{0, options_.grain}}).vocabulary = true;
  }
}

void PlanBuilder::untie() {
  std::map<int64_t, std::vector<const Module*>> ties;
  for (const Module& m : modules_)
    if (m.weight_identity != 0) ties[m.weight_identity].push_back(&m);
  for (const auto& [identity, tied] : ties) {
    const Decision* first = decided(*tied[0]);
    const auto same = [&](const Module* m) {
      const Decision* other = decided(*m);
      if (first == nullptr || other == nullptr) return first == other;
      return first->dim == other->dim && first->ranges == other->ranges;
    };
    if (std::ranges::all_of(tied, same)) continue;
    std::string names;
    for (const Module* m : tied) {
      names += (names.empty() ? "" : ", ") + m->path;
      drop(*m);
    }
    warn(c10::str("tied weights stay whole, because not all of their modules would be cut alike: ", names));
  }
}

const Decision* PlanBuilder::column_in(const std::string& parent) const {
  const auto children = children_.find(parent);
  if (children == children_.end()) return nullptr;
  for (const size_t child : children->second) {
    const auto found = decisions_.find(child);
    if (found != decisions_.end() && found->second.partition == Partition::Column && !found->second.gather_output &&
        found->second.param == "weight")
      return &found->second;
  }
  return nullptr;
}

std::map<std::string, std::map<std::string, Sizes>> PlanBuilder::widths() const {
  std::map<std::string, std::map<std::string, Sizes>> result;
  for (const Module& m : modules_) {
    if (m.attributes.empty() || result.contains(m.path)) continue;
    const Decision* column = column_in(m.path);
    const bool attention = std::ranges::any_of(m.attributes, [](const auto& item) {
      return item.first.find("head") != std::string::npos || item.first.starts_with("num_kv") ||
             item.first.starts_with("num_multi");
    });
    if (column == nullptr || !attention) continue;
    const Sizes sizes = column->own_sizes();
    const int64_t total = sum_of(sizes);
    for (const auto& [name, value] : m.attributes) {
      Sizes local;
      // The number of query heads of a key is the same on every rank, unless all share one.
      if (name == "num_key_value_groups" && column->tail.empty()) continue;
      for (const int64_t size : sizes)
        if (value * size % total == 0) local.push_back(value * size / total);
      if (local.size() == sizes.size()) result[m.path][name] = local;
    }
  }
  return result;
}

void PlanBuilder::warn_of_fused(Plan& plan) const {
  for (const auto& [rule, paths] : options_.size > 1 ? fused_ : decltype(fused_)())
    plan.warnings.push_back(c10::str(paths[0], paths.size() > 1 ? c10::str(" (and ", paths.size() - 1, " more)") : "",
                                     " holds several projections, as its name says, and its rule (", rule,
                                     ") cuts it as one: right only where heads lie one after the other, each with its "
                                     "own query, key and value. Give "
                                     "the rule \"shape\": [3, -1] for three equal projections, [2, -1] for two, "
                                     "[[...], -1] for their sizes; [1, -1] "
                                     "says that it is right"));
}

// Several ranks that hold the same whole model train it several times.
void PlanBuilder::check_cuts(const Plan& plan) const {
  const auto cuts = [](const Decision& d) { return d.partition != Partition::Skip; };
  if (options_.size == 1 || skips_ || std::ranges::any_of(plan.decisions, cuts)) return;
  std::string why;
  for (const std::string& warning : plan.warnings)
    why += "; " + warning;
  TESSERA_CHECK_VALUE(false, "parallel", "tensor_parallel.autotp_size is ", options_.size,
                      ", and nothing of this model is cut, so that all of them would train the same", why,
                      "; give rules in tensor_parallel.partition_config, or leave the ranks to data parallelism");
}

Plan PlanBuilder::finish() {
  share_norms();
  share_keys();
  cut_vocabulary();
  untie();
  Plan plan;
  plan.size = options_.size;
  for (const auto& [i, decision] : decisions_)
    plan.decisions.push_back(decision);
  for (const Module& m : modules_)
    if (!m.weight_sizes.empty() && decided(m) == nullptr)
      plan.whole.push_back(m.param == "weight" ? m.path : m.path + "." + m.param);
  plan.warnings = warnings_;
  warn_of_fused(plan);
  plan.widths = widths();
  check_cuts(plan);
  return plan;
}

}  // namespace tessera::parallel

// What rules and heuristics share in making decisions. Internal to plans and to what carries them out.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/parallel/plan.h"

namespace tessera::comm {
class Group;
}

namespace tessera::parallel {

std::string lower(std::string text);
std::string last_of(const std::string& path);    // the path's last component
std::string parent_of(const std::string& path);  // "" of a root
bool is_inside(const std::string& path, const std::string& ancestor);
// Finds components like "attn", "self_attention": the outermost path of them around `path`; "" where there is none.
std::string attention_around(const std::string& path);

// Value error for a weight that is no matrix, for a bias that does not fit the outputs of its weight, and for a model that was cut as
// another rank than this one of `group`.
void check_matrix(const std::string& path, int64_t dims, const std::string& rule);
// Value error for an embedding that is to be cut and does more than look up rows.
void check_embedding(const std::string& path, bool max_norm, bool scale_grad_by_freq, bool sparse,
                     const std::string& rule);
void check_bias(const std::string& path, at::IntArrayRef sizes, int64_t outputs);
void check_same_ranks(int rank, int size, const comm::Group& group);

// The modules with their places, and the plan in the making.
class PlanBuilder {
 public:
  PlanBuilder(const std::vector<Module>& modules, const ModelFacts& facts, const PlanOptions& options);

  const std::vector<Module>& modules() const { return modules_; }
  const ModelFacts& facts() const { return facts_; }
  const PlanOptions& options() const { return options_; }
  const Module* find(const std::string& path, const std::string& param = "weight") const;
  bool is_head(const std::string& path) const;
  // The element of a list of blocks that `path` lies in or is; "" where there is none.
  std::string block_of(const std::string& path) const;

  // Key/value heads of an attention module, by which all its layers are dealt out, where its weights tell better than the
  // configuration.
  void set_heads(const std::string& attention, int64_t heads) { heads_[attention] = heads; }
  int64_t heads_of(const std::string& path) const;
  // How `total` elements of this module are dealt out. Value error where an attention module is no whole heads.
  SizeRule size_rule(const Module& module, int64_t total) const;

  // Cuts sub-parameters of `subs` elements along `dim`; empty: one, by size_rule(). Value error for a bias that does not fit.
  Decision& cut(const Module& module, Partition partition, int64_t dim, const std::string& rule, Sizes subs = {},
                std::vector<SizeRule> rules = {});
  Decision& cut_experts(const Module& module, Partition partition, const std::string& rule);
  Decision& add(const Module& module, const std::string& rule);  // the module stays whole; there is something to do
  const Decision* decided(const Module& module) const;
  void drop(const Module& module);
  void warn(const std::string& text);
  // Notes that a rule says that a module stays whole.
  void note_skipped() { skips_ = true; }
  // Notes a layer of several projections that a rule cuts as one.
  void note_fused(const std::string& rule, const std::string& path) { fused_[rule].push_back(path); }
  // Ends the plan with what every source of decisions needs: norms and keys that heads share, vocabulary, ties, widths.
  Plan finish();

 private:
  void share_norms();
  void share_keys();
  void cut_vocabulary();
  void untie();
  void warn_of_fused(Plan& plan) const;
  void check_cuts(const Plan& plan) const;
  std::map<std::string, std::map<std::string, Sizes>> widths() const;
  // The first column layer among the children of a module whose outputs stay with their ranks.
  const Decision* column_in(const std::string& parent) const;
  size_t number(const Module& module) const { return static_cast<size_t>(&module - modules_.data()); }

  const std::vector<Module>& modules_;
  const ModelFacts& facts_;
  const PlanOptions& options_;
  std::unordered_map<std::string, size_t> places_;  // of "<path>.<param>"
  std::unordered_map<std::string, std::vector<size_t>> children_;
  std::set<std::string> blocks_;
  std::unordered_map<std::string, int64_t> heads_;
  std::map<size_t, Decision> decisions_;  // by number of the module
  std::vector<std::string> warnings_;
  std::map<std::string, std::vector<std::string>> fused_;  // paths by rule
  bool skips_ = false;
};

// Decide by what the rules say; heuristics.cpp: by what names and order say.
void follow_rules(PlanBuilder& builder);
void follow_heuristics(PlanBuilder& builder);

}  // namespace tessera::parallel

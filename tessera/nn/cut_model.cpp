#include "tessera/nn/cut_model.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformerlayer.h>

#include <algorithm>
#include <regex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/config/partition_rules.h"
#include "tessera/nn/cut_layers.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/parallel.h"
#include "tessera/nn/scope.h"
#include "tessera/nn/sequence_cut.h"
#include "tessera/nn/summed_params.h"
#include "tessera/parallel/cutting.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/sequence_regions.h"

namespace tessera::nn {
namespace {

using Kind = parallel::Module::Kind;
using parallel::Decision;
using parallel::Partition;
using parallel::SequenceRegions;
using torch::nn::EmbeddingImpl;
using torch::nn::LinearImpl;

// All modules, each once, under its first path.
std::vector<std::pair<std::string, torch::nn::Module*>> parts_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, torch::nn::Module*>> parts{{"", const_cast<torch::nn::Module*>(&module)}};
  std::unordered_set<const void*> seen{&module};
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (seen.insert(item.value().get()).second) parts.emplace_back(item.key(), item.value().get());
  return parts;
}

at::Tensor own_param(const torch::nn::Module& module, const std::string& name) {
  const auto params = module.named_parameters(/*recurse=*/false);
  const at::Tensor* found = params.find(name);
  return found == nullptr ? at::Tensor() : *found;
}

std::string class_of(const torch::nn::Module& module) {
  std::string name = module.name();
  if (const size_t colon = name.rfind(':'); colon != std::string::npos) name.erase(0, colon + 1);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

Kind kind_of(const torch::nn::Module& module, const std::string& class_name) {
  if (module.as<LinearImpl>() != nullptr) return Kind::Linear;
  if (module.as<EmbeddingImpl>() != nullptr) return Kind::Embedding;
  if (module.as<torch::nn::ModuleListImpl>() != nullptr || module.as<torch::nn::SequentialImpl>() != nullptr)
    return Kind::List;
  return parallel::lower(class_name).find("norm") != std::string::npos ? Kind::Norm : Kind::Other;
}

// Whether a module uses the weights of its children without calling them.
bool uses_children(const torch::nn::Module& module) {
  return module.as<torch::nn::MultiheadAttentionImpl>() != nullptr ||
         module.as<torch::nn::TransformerEncoderLayerImpl>() != nullptr ||
         module.as<torch::nn::TransformerDecoderLayerImpl>() != nullptr;
}

bool is_hand_cut(const torch::nn::Module& module) {
  return dynamic_cast<const CutHolder*>(&module) != nullptr;
}

// The model type that a class name says: LlamaForCausalLM is a "llama".
std::string model_type(const std::string& class_name) {
  static const std::regex ending("(For[A-Z]\\w*|LMHeadModel|Model)$"), border("([a-z0-9])([A-Z])");
  return parallel::lower(std::regex_replace(std::regex_replace(class_name, ending, ""), border, "$1_$2"));
}

bool has_rules(const Config& config) {
  return !config.tensor_parallel.partition_config.is_null() || config.tensor_parallel.preset_model.has_value();
}

parallel::PlanOptions options_for(const parallel::ModelFacts& facts, const Config& config, int size) {
  auto rules = config::partition_rules(config, facts, size, config::standard_patterns());
  return config::plan_options(config, size, rules ? std::move(*rules) : config::PartitionRules());
}

}  // namespace

std::vector<parallel::Module> plan_modules(const torch::nn::Module& module) {
  std::vector<parallel::Module> modules;
  std::vector<std::string> closed;  // paths of modules that use their children's weights
  for (const auto& [path, part] : parts_of(module)) {
    parallel::Module row;
    row.path = path;
    row.class_name = class_of(*part);
    row.kind = kind_of(*part, row.class_name);
    row.params = static_cast<int64_t>(part->parameters(/*recurse=*/false).size());
    const bool inside = std::ranges::any_of(closed, [&, &path = path](const std::string& around) {
      return around.empty() || path.starts_with(around + ".");
    });
    if (uses_children(*part)) closed.push_back(path);
    const bool layer = row.kind == Kind::Linear || row.kind == Kind::Other;
    if (is_hand_cut(*part) || (layer && inside)) row.kind = Kind::Other;
    const at::Tensor weight = own_param(*part, "weight"), bias = own_param(*part, "bias");
    if (weight.defined() && !is_hand_cut(*part) && !(layer && inside)) {
      row.weight_sizes = weight.sizes().vec();
      row.weight_identity = reinterpret_cast<int64_t>(weight.unsafeGetTensorImpl());
      row.bias = bias.defined() ? bias.numel() : 0;
    }
    modules.push_back(std::move(row));
  }
  return modules;
}

parallel::ModelFacts model_facts(const torch::nn::Module& module, const parallel::ModelFacts& given) {
  parallel::ModelFacts facts;
  for (const auto& [path, part] : parts_of(module)) {
    const auto* says = dynamic_cast<const HasFacts*>(part);
    if (says == nullptr) continue;
    if (path.empty())
      facts = says->facts();
    else
      facts.parts[path] = says->facts();
  }
  if (!given.model_type.empty()) facts.model_type = given.model_type;
  using Facts = parallel::ModelFacts;
  for (int64_t Facts::* const number :
       {&Facts::heads, &Facts::kv_heads, &Facts::head_dim, &Facts::hidden, &Facts::vocabulary})
    if (given.*number > 0) facts.*number = given.*number;
  for (const auto& [path, part] : given.parts) {
    const auto is_there = [&, &path = path](const auto& one) { return one.first == path; };
    TESSERA_CHECK_VALUE(module.as<StageLayers>() != nullptr || std::ranges::any_of(parts_of(module), is_there),
                        "tensor_parallel", "Recipe::facts has a part '", path, "', and the model has no such module");
    facts.parts[path] = part;
  }
  if (facts.model_type.empty()) facts.model_type = model_type(class_of(module));
  return facts;
}

namespace {

// Warns of numbers of heads that nobody sees: a C++ class has no attributes that could be read, or set.
void warn_of_heads(const parallel::ModelFacts& facts, parallel::Plan& plan) {
  for (const Decision& d : plan.decisions) {
    const std::string around = parallel::attention_around(d.path);
    if (d.partition != Partition::Column || d.gather_output || around.empty() || facts.of(d.path).heads > 0) continue;
    plan.warnings.push_back(
        around +
        ": how many heads it has is not known, so what its layers are cut into may be no whole heads, and "
        "code that reshapes by a number of its own computes something else; take numbers of heads from "
        "sizes, and say how many there are in Recipe::facts, or let the class, or the model, be a "
        "tessera::nn::HasFacts");
    return;
  }
}

// A rank draws from its own generator; ranks with slices of several sizes do not draw equally many numbers.
void warn_of_draws(const torch::nn::Module& module, parallel::Plan& plan) {
  const auto uneven = [](const Decision& d) {
    const parallel::Sizes sizes = d.sizes();
    return std::ranges::any_of(sizes, [&](int64_t size) { return size != sizes[0]; });
  };
  if (std::ranges::none_of(plan.decisions, uneven)) return;
  for (const auto& [path, part] : parts_of(module)) {
    if (class_of(*part).find("Dropout") == std::string::npos) continue;
    plan.warnings.push_back(
        path +
        ": ranks have slices of several sizes, so where this drops some of a slice they draw different "
        "numbers from there on, and what they hold whole is no longer dropped alike; use a size that "
        "tensor_parallel.autotp_size divides, or drop nothing between column and row layers");
    return;
  }
}

parallel::Plan plan_with(const torch::nn::Module& module, const parallel::ModelFacts& facts,
                         const parallel::PlanOptions& options) {
  parallel::Plan plan = parallel::make_plan(plan_modules(module), facts, options);
  warn_of_heads(facts, plan);
  warn_of_draws(module, plan);
  return plan;
}

}  // namespace

parallel::Plan plan_for(const torch::nn::Module& module, const Config& config, int size,
                        const parallel::ModelFacts& given) {
  const parallel::ModelFacts facts = model_facts(module, given);
  return plan_with(module, facts, options_for(facts, config, size));
}

namespace {

class Cutter {
 public:
  Cutter(torch::nn::Module& module, const parallel::Plan& plan, const std::optional<SequenceRegions>& regions,
         const Config& config, const comm::GroupPtr& group, const Construction* building)
      : plan_(plan),
        regions_(regions),
        group_(group),
        building_(building),
        overlap_(config::overlaps_tensor_parallel(config)),
        sequence_(regions ? std::make_shared<SequenceCut>(group) : nullptr) {
    std::vector<std::string> lists;
    for (const auto& [path, part] : parts_of(module)) {
      parts_[path] = part;
      if (kind_of(*part, "") == Kind::List) lists.push_back(path);
    }
    summed_ = std::make_shared<SummedParams>(module, std::move(lists), group);
    for (const auto& item : module.named_parameters()) {
      names_.emplace(item.value().unsafeGetTensorImpl(), item.key());
      params_[item.key()] = item.value();
    }
    find_siblings();
  }

  // Throws what cannot be carried out, before anything is changed.
  void check() const {
    for (const Decision& d : plan_.decisions) {
      if (d.partition == Partition::Skip) continue;
      const at::Tensor weight = own_param(*parts_.at(d.path), "weight");
      parallel::check_matrix(d.path, weight.dim(), d.rule);
      const auto* embedding = parts_.at(d.path)->as<EmbeddingImpl>();
      if (embedding == nullptr) continue;
      const auto& options = embedding->options;
      parallel::check_embedding(d.path, options.max_norm().has_value(), options.scale_grad_by_freq(), options.sparse(),
                                d.rule);
    }
    if (!regions_) return;
    for (const std::string& path : regions_->inner)
      check_border(path, /*enters=*/true);
    check_border(regions_->first, true);
    check_border(regions_->last, false);
  }

  // `summed_names`: names of parameters whose gradient a rule sums.
  void run(const std::vector<std::string>& summed_names) {
    for (const Decision& d : plan_.decisions)
      carry_out(d);
    for (const std::string& name : summed_names)
      summed_->sum_gradient(params_.at(name));
    if (regions_) set_borders();
    for (Noted& noted : notes_)
      cut(noted);
  }

 private:
  struct Noted {
    at::Tensor param;
    CutParamPtr note = c10::make_intrusive<CutParam>();
    parallel::Ranges ranges = {};  // this rank's
    int64_t dim = 0;
  };

  void check_border(const std::string& path, bool enters) const {
    const auto* holder = dynamic_cast<const ScopeHolder*>(parts_.at(path));
    const bool fits = holder != nullptr && (enters ? holder->enters_with_tensor() : holder->leaves_with_tensor());
    TESSERA_CHECK_VALUE(fits, "tensor_parallel", path,
                        ": tessera.sequence_parallel_norms cuts or joins activations where ",
                        enters ? "it is called" : "it returns",
                        ", which Tessera cannot see; let its class be a tessera::nn::Hooked, or register "
                        "tessera::nn::unit() of it, with a forward() that ",
                        enters ? "has a tensor as its first argument" : "returns a tensor");
  }

  // Note [Sequence regions] in parallel/sequence_regions.h.
  void set_borders() {
    const auto add = [&](const std::string& path, const Borders& more) {
      auto* holder = dynamic_cast<ScopeHolder*>(parts_.at(path));
      Borders borders = holder->borders();
      if (more.enter) borders.enter = more.enter;
      if (more.leave) borders.leave = more.leave;
      holder->set_borders(std::move(borders));
    };
    for (const auto& [path, region] : inner_)
      add(path, {.enter = [cut = sequence_, region = region](const at::Tensor& x) {
            return cut->is_on() ? region.entrance->open(x, region) : x;
          }});
    add(regions_->first,
        {.enter = [cut = sequence_, path = regions_->first](const at::Tensor& x) { return cut->split(x, path); }});
    add(regions_->last,
        {.leave = [cut = sequence_, path = regions_->last](const at::Tensor& x) { return cut->join(x, path); }});
    for (const std::string& path : regions_->summed())
      for (const at::Tensor& param : parts_.at(path)->parameters(/*recurse=*/false))
        summed_->sum_gradient(param);
  }
  bool is_inner(const std::string& path) const {
    return regions_ && std::ranges::find(regions_->inner, path) != regions_->inner.end();
  }
  // Has the layer's outside be parts of a sequence.
  void cut_sequence(const std::string& parent, CutLayer& layer) {
    std::shared_ptr<parallel::Entrance>& entrance = entrances_[parent];
    if (entrance == nullptr) entrance = std::make_shared<parallel::Entrance>(1);
    layer.sequence = sequence_;
    layer.region.entrance = nullptr;  // one that is opened takes nothing else
    layer.cut_region = layer.region;
    layer.cut_region.sequence_dim = parallel::kSequenceDim;
    if (layer.kind != CutLayer::Kind::Column) return;
    layer.cut_region.entrance = entrance;
    inner_.try_emplace(parent, layer.cut_region);
  }

  // Column layers of one parent that may have one input share their way into the region.
  void find_siblings() {
    std::map<std::string, int> columns;
    for (const Decision& d : plan_.decisions)
      if (is_inner_column(d)) ++columns[parallel::parent_of(d.path)];
    for (const auto& [parent, number] : columns)
      if (number > 1) entrances_[parent] = std::make_shared<parallel::Entrance>(number);
  }
  bool is_inner_column(const Decision& d) const {
    const bool embedding = parts_.at(d.path)->as<EmbeddingImpl>() != nullptr;
    return d.partition == Partition::Column && !embedding && !d.gather_output && !d.vocabulary;
  }

  std::shared_ptr<CutLayer> layer_of(const Decision& d, CutLayer::Kind kind) {
    auto layer = std::make_shared<CutLayer>();
    layer->kind = kind;
    layer->region = {.group = group_, .overlap = overlap_, .label = d.path};
    if (const auto found = entrances_.find(parallel::parent_of(d.path));
        found != entrances_.end() && is_inner_column(d))
      layer->region.entrance = found->second;
    layer->total = d.total;
    layer->gather = d.gather_output;
    layer->own_use = d.own_use;
    layer->tail = d.tail;
    layer->rule = d.rule;
    if (d.partition != Partition::Skip) {
      layer->ranges = d.ranges[group_->rank()];
      layer->sizes = d.sizes();
    }
    if (is_inner(parallel::parent_of(d.path))) cut_sequence(parallel::parent_of(d.path), *layer);
    return layer;
  }

  Noted& note_for(const at::Tensor& param) {
    const auto [found, fresh] = places_.try_emplace(param.unsafeGetTensorImpl(), notes_.size());
    if (fresh) {
      notes_.push_back({.param = param});
      notes_.back().note->name = names_.at(param.unsafeGetTensorImpl());
    }
    return notes_[found->second];
  }

  void carry_out(const Decision& d) {
    torch::nn::Module& part = *parts_.at(d.path);
    const at::Tensor weight = own_param(part, "weight"), bias = own_param(part, "bias");
    if (d.sum_gradient)
      for (const at::Tensor& param : part.parameters(/*recurse=*/false))
        summed_->sum_gradient(param);
    if (d.partition == Partition::Skip) {
      if (d.own_use.empty()) return;
      const auto layer = layer_of(d, CutLayer::Kind::SharedTail);
      note_for(weight).note->linear = layer;
      if (bias.defined()) note_for(bias).note->bias = layer;
      return;
    }
    Noted& noted = note_for(weight);
    noted.ranges = d.ranges[group_->rank()];
    noted.dim = d.dim;
    if (auto* embedding = part.as<EmbeddingImpl>())
      use_embedding(d, *embedding, *noted.note);
    else
      use_linear(d, part, *noted.note);
  }

  // Rows of what is looked up are also used as the weight of a linear layer without a module of its own, where an output layer is
  // tied by code: F::linear(x, embed->weight).
  void use_embedding(const Decision& d, EmbeddingImpl& embedding, CutParam& note) {
    const bool vocabulary = d.dim == 0;
    const auto layer = layer_of(d, vocabulary ? CutLayer::Kind::Vocabulary : CutLayer::Kind::Embedding);
    layer->padding = embedding.options.padding_idx().value_or(-1);
    note.embedding = layer;
    const int64_t mine = layer->sizes[group_->rank()];
    if (vocabulary)  // an index is the whole's, which the layer's check of a slice does not know
      embedding.options.num_embeddings(mine).padding_idx(std::nullopt);
    else
      embedding.options.embedding_dim(mine);
    if (note.linear || (!vocabulary && !d.gather_output)) return;
    const auto tied = layer_of(d, vocabulary ? CutLayer::Kind::Column : CutLayer::Kind::Row);
    tied->gather = vocabulary;
    note.linear = tied;
  }

  void use_linear(const Decision& d, torch::nn::Module& part, CutParam& note) {
    const bool column = d.partition == Partition::Column;
    const auto layer = layer_of(d, column ? CutLayer::Kind::Column : CutLayer::Kind::Row);
    if (!column) layer->summed = summed_;
    note.linear = layer;
    const int64_t mine = layer->sizes[group_->rank()];
    if (auto* linear = part.as<LinearImpl>())
      column ? linear->options.out_features(mine) : linear->options.in_features(mine);
    const at::Tensor bias = own_param(part, "bias");
    if (!bias.defined()) return;
    if (layer->sequence != nullptr && !column) summed_->sum_gradient(bias);  // it is added to a part
    if (!column) return;
    parallel::check_bias(d.path, bias.sizes(), d.total);
    Noted& noted = note_for(bias);
    noted.ranges = layer->ranges;
    noted.note->bias = layer;
  }

  // Cuts the first rank's values.
  void cut(Noted& noted) const {
    const at::NoGradGuard no_grad;
    at::Tensor& param = noted.param;
    if (building_ != nullptr) building_->restore(param);
    at::Tensor value = param.detach().contiguous();
    group_->broadcast(value, 0, "value of '" + noted.note->name + "' before it is cut");
    if (!noted.ranges.empty()) {
      noted.note->cut = shard::cut_along(value.sizes().vec(), noted.dim, noted.ranges);
      value = parallel::take_slice(value, *noted.note->cut);
    }
    set_cut(param, value, noted.note);
    param.mutable_grad().reset();
  }

  const parallel::Plan& plan_;
  const std::optional<SequenceRegions>& regions_;
  comm::GroupPtr group_;
  const Construction* building_;
  bool overlap_;
  std::shared_ptr<SequenceCut> sequence_;          // where regions are
  std::map<std::string, parallel::Region> inner_;  // of one column layer, by path of its parent
  std::map<std::string, torch::nn::Module*> parts_;
  std::unordered_map<const void*, std::string> names_;  // the first name of each
  std::map<std::string, at::Tensor> params_;
  std::map<std::string, std::shared_ptr<parallel::Entrance>> entrances_;  // by path of the parent
  std::vector<Noted> notes_;  // in the order of the decisions, which is the same on all ranks
  std::unordered_map<const void*, size_t> places_;
  std::shared_ptr<SummedParams> summed_;
};

}  // namespace

std::optional<parallel::Plan> cut_model(torch::nn::Module& module, const Config& config, const comm::GroupPtr& group,
                                        const Construction* building, const parallel::ModelFacts& given) {
  if (config.tensor_parallel.autotp_size <= 1 || group->size() == 1) return std::nullopt;
  bool is_cut = false, cuts_sequence = false;
  for (const auto& item : module.named_parameters()) {
    const CutParam* param = cut_param(item.value());
    if (param == nullptr) continue;
    const CutLayer& layer = *param->layer();
    const comm::GroupPtr& before = layer.region.group;
    cuts_sequence = cuts_sequence || layer.sequence != nullptr;
    parallel::check_same_ranks(before->rank(), before->size(), *group);
    is_cut = true;
  }
  TESSERA_CHECK_VALUE(!is_cut || cuts_sequence || !config.tessera.sequence_parallel_norms, "config",
                      "tessera.sequence_parallel_norms: the model was cut without it; build it anew");
  if (is_cut) return std::nullopt;
  const auto by_hand = [](const auto& part) { return is_hand_cut(*part.second); };
  // A stage of a pipeline that is cut by hand may have no such layer.
  const bool stage = module.as<StageLayers>() != nullptr;
  if (!has_rules(config) && (stage || std::ranges::any_of(parts_of(module), by_hand))) return std::nullopt;
  const parallel::ModelFacts facts = model_facts(module, given);
  const parallel::PlanOptions options = options_for(facts, config, group->size());
  std::optional<parallel::Plan> plan = plan_with(module, facts, options);
  std::optional<SequenceRegions> regions;
  if (config.tessera.sequence_parallel_norms) {
    regions = parallel::find_sequence_regions(plan_modules(module), plan->decisions,
                                              {.model_type = facts.model_type, .known_types = false});
    plan->notes.push_back(regions->text());
  }
  Cutter cutter(module, *plan, regions, config, group, building);
  cutter.check();
  cutter.run(parallel::left_whole(options.rules, module.named_parameters().keys()).summed);
  return plan;
}

}  // namespace tessera::nn

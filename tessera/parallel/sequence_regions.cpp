#include "tessera/parallel/sequence_regions.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/parallel/cutting.h"

namespace tessera::parallel {
namespace {

constexpr const char* kKey = "tessera.sequence_parallel_norms";
// Types of models that are known to treat tokens by themselves between their attentions and MLPs, in Transformers' code; the last ones
// have experts or low-rank projections.
constexpr std::array<std::string_view, 11> kServed{"llama",     "mistral",     "qwen2",      "qwen3",
                                                   "phi3",      "gpt_neox",    "bloom",      "mixtral",
                                                   "qwen2_moe", "deepseek_v2", "deepseek_v3"};
constexpr size_t kFirstMixed = 7;

// Why a model does not take it.
struct Reason {
  std::string text;
};
template <class... A>
[[noreturn]] void refuse(const A&... parts) {
  throw Reason{c10::str(parts...)};
}

bool is_norm(const Module& module) {
  return lower(module.class_name).find("norm") != std::string::npos;
}
bool is_inside(const std::string& path, const std::string& around) {
  return path.size() > around.size() && path.starts_with(around) && path[around.size()] == '.';
}
std::string name_of(const std::string& path) {
  return path.substr(path.rfind('.') + 1);  // npos + 1 is 0
}
std::string listed(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names)
    text += (text.size() > 1 ? ", '" : "'") + name + "'";
  return text + "]";
}

class Finder {
 public:
  Finder(const std::vector<Module>& modules, const std::vector<Decision>& decisions, const RegionFacts& facts)
      : facts_(facts),
        takes_mixed_(facts.known_types &&
                     std::find(kServed.begin() + kFirstMixed, kServed.end(), facts.model_type) != kServed.end()) {
    for (const Module& module : modules) {
      if (!known_.emplace(module.path, &module).second) continue;
      order_.push_back(&module);
      if (!module.path.empty()) children_[parent_of(module.path)].push_back(&module);
    }
    for (const Decision& d : decisions)
      if (d.partition != Partition::Skip && !d.vocabulary) cut_.push_back(&d);
  }

  SequenceRegions run() {
    const std::string blocks = list_of_blocks();
    for (const Module* block : children_[blocks])
      check_block(*block);
    if (!found_.sums.empty() && facts_.router_loss)
      refuse("its configuration has output_router_logits, and the gradient of the router's own loss would be summed");
    found_.last = last_norm(blocks);
    found_.first = children_[blocks].front()->path;
    found_.norms.insert(found_.norms.begin(), found_.last);
    if (facts_.known_types && std::ranges::find(kServed, facts_.model_type) == kServed.end())
      refuse("its code is not known to treat each token by itself there; served are ", c10::Join(", ", kServed));
    return std::move(found_);
  }

 private:
  using Layers = std::map<std::string, const Decision*>;  // by path, of one module

  std::string list_of_blocks() const {
    std::set<std::string> around;
    for (const Decision* d : cut_) {
      std::string outermost;
      for (const Module* module : order_)
        if (module->kind == Module::Kind::List && is_inside(d->path, module->path) &&
            (outermost.empty() || module->path.size() < outermost.size()))
          outermost = module->path;
      around.insert(outermost);
    }
    if (around.size() != 1 || around.contains("")) {
      const std::vector<std::string> names(around.begin(), around.end());
      refuse("there must be one list of blocks; what is cut lies in ", around.empty() ? "none" : listed(names));
    }
    return *around.begin();
  }

  std::string last_norm(const std::string& blocks) {
    const auto& beside = children_[parent_of(blocks)];
    const auto list = std::ranges::find(beside, blocks, &Module::path);
    std::vector<std::string> found, names;
    for (auto next = list + 1; next != beside.end(); ++next) {
      if (!is_norm(**next)) continue;
      found.push_back((*next)->path);
      names.push_back(name_of(found.back()));
    }
    if (found.size() != 1)
      refuse("one norm must follow the blocks of ", blocks, ", after which parts are joined; found ", listed(names));
    return found.front();
  }

  Layers layers_in(const std::string& around) const {
    Layers layers;
    for (const Decision* d : cut_)
      if (is_inside(d->path, around)) layers.emplace(d->path, d);
    return layers;
  }
  // The module and all inside it.
  std::vector<const Module*> parts_of(const Module& module) const {
    std::vector<const Module*> parts;
    for (const Module* part : order_)
      if (part == &module || is_inside(part->path, module.path)) parts.push_back(part);
    return parts;
  }

  void check_block(const Module& block) {
    for (const Module* child : children_[block.path])
      if (std::ranges::any_of(cut_, [&](const Decision* d) { return d->path == child->path; }))
        refuse("layers of ", block.path, " are cut in the block itself, where norms work on parts");
    for (const Module* child : children_[block.path])
      check_child(*child);
    if (block.params > 0) refuse(block.path, " has parameters of its own");
  }

  void check_child(const Module& child) {
    const Layers layers = layers_in(child.path);
    if (!layers.empty()) {
      if (takes_mixed_ && is_mixed(child, layers)) return check_mixed(child, layers);
      check_inner(child, layers);
      found_.inner.push_back(child.path);
    } else if (is_norm(child)) {
      found_.norms.push_back(child.path);
    } else if (std::ranges::any_of(parts_of(child), [](const Module* part) { return part->params > 0; })) {
      refuse(child.path, ", a ", child.class_name,
             ", is whole beside the norms of its block (tensor_parallel.preset_model or partition_config may cut it)");
    }
  }

  // Refuses a module whose direct children do not begin and end the region, or with other weights than norms of heads.
  void check_inner(const Module& module, const Layers& layers) const {
    for (const Module* part : parts_of(module)) {
      const auto layer = layers.find(part->path);
      const bool is_cut = layer != layers.end();
      if (part->params > 0 && !is_cut && !(part != &module && is_norm(*part)))
        refuse(part->path, ", a ", part->class_name, ", is whole inside a module that is cut");
      if (!is_cut) continue;
      const Decision& d = *layer->second;
      if (parent_of(part->path) != module.path || d.gather_output || d.param != "weight")
        refuse(part->path, " is neither a column nor a row layer directly in an attention or MLP");
    }
    const std::vector<std::string> rows = rows_of(layers);
    if (rows.size() != 1 || layers.size() < 2)
      refuse(module.path, " must have column layers and one row layer; ", layers.size(), " are cut, row layers are ",
             listed(rows));
  }

  static std::vector<std::string> rows_of(const Layers& layers) {
    std::vector<std::string> rows;
    for (const auto& [path, d] : layers)
      if (d->partition == Partition::Row) rows.push_back(path);
    return rows;
  }

  // Whether a module has layers that are whole, or layers further down than its children.
  bool is_mixed(const Module& module, const Layers& layers) const {
    return std::ranges::any_of(parts_of(module), [&](const Module* part) {
      if (part->params == 0) return false;
      const bool deep = part != &module && parent_of(part->path) != module.path;
      return deep || (!layers.contains(part->path) && !is_norm(*part));
    });
  }

  void check_mixed(const Module& module, const Layers& layers) {
    const std::vector<std::string> rows = rows_of(layers);
    if (rows.empty()) refuse(module.path, " has no row layer");
    const bool ends = rows.size() == 1 && parent_of(rows[0]) == module.path && layers.at(rows[0])->param == "weight";
    if (facts_.jitter.contains(module.path))
      refuse(module.path, " has jitter_noise, which ranks would draw each for themselves");
    for (const Module* part : parts_of(module)) {
      const bool row = std::ranges::find(rows, part->path) != rows.end();
      if (row && !ends && part->kind != Module::Kind::Experts && part->bias > 0)
        refuse(part->path, " has a bias, which the sum over the ranks would count several times");
      if (!layers.contains(part->path) && part->params > 0) found_.whole.push_back(part->path);
    }
    found_.mixed.push_back(module.path);
    if (!ends) found_.sums.push_back(module.path);
  }

  const RegionFacts& facts_;
  const bool takes_mixed_;
  std::vector<const Module*> order_;
  std::map<std::string, const Module*> known_;
  std::map<std::string, std::vector<const Module*>> children_;
  std::vector<const Decision*> cut_;
  SequenceRegions found_;
};

}  // namespace

std::vector<std::string> SequenceRegions::summed() const {
  std::vector<std::string> all = norms;
  all.insert(all.end(), whole.begin(), whole.end());
  return all;
}

std::string SequenceRegions::text() const {
  const std::string& one = inner.empty() ? mixed.front() : inner.front();
  return c10::str("activations from ", first, " to ", last, " are cut along the sequence; whole in ",
                  inner.size() + mixed.size(), " modules like ", one, "; gradients of ", norms.size(), " norms",
                  whole.empty() ? "" : c10::str(" and ", whole.size(), " layers"), " are summed");
}

bool stays_whole(const at::Tensor& x, int ranks, const std::string& path) {
  const bool fits = x.dim() == 3 && x.size(kSequenceDim) % ranks == 0;
  TESSERA_CHECK_VALUE(fits || !c10::GradMode::is_enabled(), "tensor_parallel", path, ": ", kKey,
                      " cuts activations of [batch, sequence, hidden] along the sequence; ", x.sizes(),
                      " cannot be cut into ", ranks,
                      " equal parts (the tensor-parallel ranks): pad the sequences, or leave the key out");
  return !fits;
}

SequenceRegions find_sequence_regions(const std::vector<Module>& modules, const std::vector<Decision>& decisions,
                                      const RegionFacts& facts) {
  try {
    return Finder(modules, decisions, facts).run();
  } catch (const Reason& reason) {
    TESSERA_FAIL(::c10::ValueError, "[config] ", kKey,
                 " cuts what lies between attention and MLP, which a model of type '", facts.model_type,
                 "' does not take: ", reason.text, "; leave the key out");
  }
}

}  // namespace tessera::parallel

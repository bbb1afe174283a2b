#include "tessera/config/partition_rules.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/config/text.h"

namespace tessera::config {

using parallel::Partition;
using parallel::Rule;

namespace {

constexpr const char* kSection = "tensor_parallel.partition_config";

// An object of the section with its keys' values where they are absent, in the order in which errors name them.
using Defaults = std::vector<std::pair<const char*, Value>>;
const Defaults& section_keys() {
  static const Defaults keys{{"use_default_specs", true},
                             {"strict_mode", false},
                             {"embedding_partition_dim", 1},
                             {"lm_head_patterns", List{"lm_head", "embed_out"}},
                             {"tp_size", 1},
                             {"layer_specs", List{}}};
  return keys;
}
const Defaults& spec_keys() {
  static const Defaults keys{{"patterns", List{}},     {"partition_type", "column"}, {"shape", Value()},
                             {"partition_dim", {}},    {"model_types", Value()},     {"gather_output", false},
                             {"grad_allreduce", false}};
  return keys;
}

std::string shown(const Value& value) {
  return value.text().substr(0, 100);
}

class Section {
 public:
  Section(const Value& value, const Defaults& known, std::string where) : where_(std::move(where)) {
    const auto* given = std::get_if<Params>(&value.data);
    TESSERA_CHECK_VALUE(given != nullptr, "config", where_, " must be an object, got ", shown(value));
    for (const auto& [name, usual] : known) {
      const auto own = given->find(name);
      values_[name] = own == given->end() ? usual : own->second;
    }
  }

  const std::string& where() const { return where_; }
  const Value& operator[](const char* name) const { return values_.at(name); }

  template <class T>
  const T& as(const char* name) const {
    const T* value = std::get_if<T>(&values_.at(name).data);
    TESSERA_CHECK_VALUE(value != nullptr, "config", where_, ".", name,
                        " has the wrong type: ", shown(values_.at(name)));
    return *value;
  }
  // The texts of a key; a single text is a list of one.
  std::vector<std::string> texts(const char* name) const {
    const Value& value = values_.at(name);
    std::vector<std::string> result;
    bool right = true;
    if (const auto* one = std::get_if<std::string>(&value.data)) {
      result = {*one};
    } else if (const auto* list = std::get_if<List>(&value.data)) {
      for (const Value& item : *list) {
        const auto* text = std::get_if<std::string>(&item.data);
        right = right && text != nullptr;
        if (text != nullptr) result.push_back(*text);
      }
    } else {
      right = false;
    }
    TESSERA_CHECK_VALUE(right, "config", where_, ".", name, " must be a list of texts, got ", shown(value));
    return result;
  }

 private:
  std::string where_;
  std::map<std::string, Value> values_;
};

int64_t whole_number(const Value& value, const std::string& where) {
  const auto* number = std::get_if<int64_t>(&value.data);
  TESSERA_CHECK_VALUE(number != nullptr, "config", where, ": shape holds ", shown(value), ", which is no whole number");
  return *number;
}

// A list of numbers, one of which may be a list itself.
std::optional<parallel::PackedShape> shape_of(const Section& spec, Partition partition) {
  const Value& given = spec["shape"];
  const std::string& where = spec.where();
  if (given.is_null()) return std::nullopt;
  const auto* entries = std::get_if<List>(&given.data);
  TESSERA_CHECK_VALUE(entries != nullptr, "config", where, ".shape must be a list, got ", shown(given));
  parallel::PackedShape shape;
  shape.dim = partition == Partition::Row ? 1 : 0;
  if (const Value& dim = spec["partition_dim"]; !dim.is_null()) {
    const auto* number = std::get_if<int64_t>(&dim.data);
    TESSERA_CHECK_VALUE(number != nullptr, "config", where, ".partition_dim must be an integer, got ", shown(dim));
    shape.dim = static_cast<int>(*number);
  }
  for (const Value& entry : *entries) {
    const auto* several = std::get_if<List>(&entry.data);
    parallel::Sizes sizes;
    if (several != nullptr) {
      const auto at = static_cast<int>(shape.entries.size());
      TESSERA_CHECK_VALUE(shape.nested < 0, "config", where, ": entries ", shape.nested, " and ", at,
                          " of a shape are lists; a nested tuple only allowed at partition_dim (", shape.dim, ")");
      shape.nested = at;
      for (const Value& item : *several)
        sizes.push_back(whole_number(item, where));
    } else {
      sizes.push_back(whole_number(entry, where));
    }
    shape.entries.push_back(std::move(sizes));
  }
  parallel::check_shape(shape, where);
  return shape;
}

Partition partition_of(const Section& spec) {
  const auto* text = std::get_if<std::string>(&spec["partition_type"].data);
  std::string names;
  for (const Partition kind : {Partition::Column, Partition::Row, Partition::Skip}) {
    const char* name = parallel::partition_name(kind);
    if (text != nullptr && lower(*text) == name) return kind;
    names += std::string(names.empty() ? "" : ", ") + name;
  }
  TESSERA_FAIL(c10::ValueError, "[config] ", spec.where(), ".partition_type must be one of ", names, ", got ",
               shown(spec["partition_type"]));
}

void append_rules(const Section& spec, const PatternMatcher& matcher, std::vector<Rule>& rules) {
  const std::string& where = spec.where();
  Rule rule;
  rule.source = where;
  rule.partition = partition_of(spec);
  rule.shape = shape_of(spec, rule.partition);
  rule.gather_output = spec.as<bool>("gather_output");
  rule.sum_gradient = spec.as<bool>("grad_allreduce") && rule.partition == Partition::Skip;
  TESSERA_CHECK_BUILT(!rule.gather_output || !rule.shape, "config", where, ": gather_output with shape is not served");
  TESSERA_CHECK_VALUE(!rule.gather_output || rule.partition == Partition::Column, "config", where,
                      ".gather_output is for partition_type column, not ", parallel::partition_name(rule.partition));
  const std::vector<std::string> patterns = spec.texts("patterns");
  TESSERA_CHECK_VALUE(!patterns.empty(), "config", where, ".patterns is empty");
  if (!spec["model_types"].is_null())
    for (std::string& type : spec.texts("model_types"))
      rule.model_types.push_back(lower(std::move(type)));
  for (const std::string& pattern : patterns) {
    rule.pattern = pattern;
    rule.matches = matcher(pattern, where + ".patterns");
    rules.push_back(rule);
  }
}

void check_keys(const Value& section, const Defaults& known, const std::string& where, Report& report) {
  const auto* given = std::get_if<Params>(&section.data);
  if (given == nullptr) return report.error(where, "must be an object, got " + shown(section), Problem::Kind::Value);
  std::vector<std::string> names;
  for (const auto& [name, usual] : known)
    names.emplace_back(name);
  for (const auto& [name, value] : *given) {
    if (std::ranges::find(names, name) != names.end()) continue;
    const std::vector<std::string> near = all_nearest(name, names);
    report.error(where + "." + name,
                 "unknown key; " + (near.empty() ? "known are " + join(names, ", ")
                                                 : "did you mean \"" + join(near, "\" or \"") + "\"?"),
                 Problem::Kind::Unknown);
  }
}

std::vector<Rule> preset(const std::string& name, const parallel::ModelFacts& facts, const PatternMatcher& matcher) {
  return parallel::preset_rules(name, facts,
                                [&](const std::string& pattern) { return matcher(pattern, "preset " + name); });
}

PartitionRules configured(const Config& config, const parallel::ModelFacts& facts, int size,
                          const PatternMatcher& matcher) {
  const auto& tensor = config.tensor_parallel;
  const Section section(tensor.partition_config, section_keys(), kSection);
  PartitionRules result;
  result.source = "partition_config";
  result.strict = section.as<bool>("strict_mode");
  result.head_names = section.texts("lm_head_patterns");
  const bool defaults = section.as<bool>("use_default_specs");
  const List& specs = section.as<List>("layer_specs");
  const Value &ranks = section["tp_size"], &dim = section["embedding_partition_dim"];
  TESSERA_CHECK_VALUE(ranks == Value(1) || ranks == Value(size), "config", kSection, ".tp_size is ", shown(ranks),
                      "; it must be 1 or tensor_parallel.autotp_size (", size, ")");
  TESSERA_CHECK_VALUE(dim == Value(0) || dim == Value(1), "config", kSection,
                      ".embedding_partition_dim must be 0 or 1, got ", shown(dim));
  result.embedding_dim = dim == Value(1) ? 1 : 0;
  for (size_t number = 0; number < specs.size(); ++number)
    append_rules(Section(specs[number], spec_keys(), c10::str(kSection, ".layer_specs[", number, "]")), matcher,
                 result.rules);
  if (defaults && tensor.preset_model)
    for (Rule& rule : preset(*tensor.preset_model, facts, matcher))
      result.rules.push_back(std::move(rule));
  TESSERA_CHECK_VALUE(!result.rules.empty(), "config", kSection,
                      ": there is no rule; give layer_specs, or preset_model with use_default_specs true");
  return result;
}

}  // namespace

PatternMatcher standard_patterns() {
  return
      [](const std::string& pattern, const std::string& where) { return parallel::standard_matcher(where)(pattern); };
}

void check_partition_keys(const Config& config, Report& report) {
  const Value& section = config.tensor_parallel.partition_config;
  if (section.is_null()) return;
  check_keys(section, section_keys(), kSection, report);
  const auto* given = std::get_if<Params>(&section.data);
  const auto specs = given == nullptr ? Params::const_iterator() : given->find("layer_specs");
  if (given == nullptr || specs == given->end()) return;
  const auto* list = std::get_if<List>(&specs->second.data);
  for (size_t number = 0; list != nullptr && number < list->size(); ++number)
    check_keys((*list)[number], spec_keys(), c10::str(kSection, ".layer_specs[", number, "]"), report);
}

std::optional<PartitionRules> partition_rules(const Config& config, const parallel::ModelFacts& facts, int size,
                                              const PatternMatcher& matcher) {
  const auto& tensor = config.tensor_parallel;
  if (!tensor.partition_config.is_null()) return configured(config, facts, size, matcher);
  if (!tensor.preset_model || tensor.preset_model->empty()) return std::nullopt;
  PartitionRules result;
  result.rules = preset(*tensor.preset_model, facts, matcher);
  result.source = "preset " + *tensor.preset_model;
  return result;
}

parallel::PlanOptions plan_options(const Config& config, int size, PartitionRules rules) {
  const auto& tensor = config.tensor_parallel;
  const Value& vocabulary = tensor.vocab_parallel_lm_head;
  parallel::PlanOptions options;
  options.size = size;
  options.rules = std::move(rules.rules);
  options.strict = rules.strict;
  options.grain = tensor.tp.tp_grain_size;
  options.embedding_dim = rules.embedding_dim;
  options.head_names = std::move(rules.head_names);
  options.vocab_parallel = !vocabulary.is_null() && vocabulary != Value(false) && vocabulary != Value(0);
  return options;
}

bool overlaps_tensor_parallel(const Config& config) {
  return config.tensor_parallel.tp_overlap_comm || !config.given.contains("tensor_parallel.tp_overlap_comm");
}

}  // namespace tessera::config

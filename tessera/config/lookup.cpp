#include <algorithm>
#include <cmath>
#include <set>
#include <unordered_map>

#include "tessera/config/lookup.h"
#include "tessera/config/served.h"
#include "tessera/config/text.h"

namespace tessera::config {
namespace {

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

std::string last_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? path : path.substr(dot + 1);
}

std::string child(const std::string& section, const std::string& name) {
  return section.empty() ? name : section + "." + name;
}

// Other spellings of whole sections.
const std::vector<std::pair<std::string, std::string>>& section_aliases() {
  static const std::vector<std::pair<std::string, std::string>> all{
      {"bfloat16", "bf16"}, {"tensor_parallel.tensor_parallel", "tensor_parallel.tp"}};
  return all;
}

const std::unordered_map<std::string, std::string>& alias_map() {
  static const auto all = [] {
    std::unordered_map<std::string, std::string> map;
    for (const auto& [alias, path] : section_aliases()) {
      map[alias] = path;
    }
    for (const Key& key : keys()) {
      for (const std::string& alias : key.aliases) {
        map[child(parent_of(key.path), alias)] = key.path;
      }
    }
    return map;
  }();
  return all;
}

std::string limits_text(const char* type, const Limits& limits) {
  std::string out = type;
  const bool low = std::isfinite(limits.min), high = std::isfinite(limits.max);
  const auto number = [](double v) { return v == std::floor(v) ? std::to_string(int64_t(v)) : number_text(v); };
  if (low && high) {
    out += " from " + number(limits.min) + " to " + number(limits.max);
  } else if (low) {
    out += (limits.above ? " > " : " >= ") + number(limits.min);
  }
  return out;
}

std::string choices_text(const std::vector<std::string>& choices) {
  return "one of " + join(choices, ", ");
}

struct AllowedText {
  const Limits& limits;
  std::string operator()(bool*) const { return "true or false"; }
  std::string operator()(std::optional<bool>*) const { return "true or false"; }
  std::string operator()(int64_t*) const { return limits_text("integer", limits); }
  std::string operator()(std::optional<int64_t>*) const { return limits_text("integer", limits); }
  std::string operator()(double*) const { return limits_text("number", limits); }
  std::string operator()(std::optional<double>*) const {
    return limits_text("number", limits) + (limits.takes_auto ? ", or auto" : "");
  }
  std::string operator()(std::string*) const { return text(); }
  std::string operator()(std::optional<std::string>*) const { return text(); }
  std::string operator()(std::vector<std::string>*) const { return "list of texts"; }
  std::string operator()(std::optional<std::vector<std::string>>*) const { return "list of texts"; }
  std::string operator()(std::vector<int64_t>*) const { return "list of integers"; }
  std::string operator()(c10::ScalarType*) const { return "fp32, fp16 or bf16"; }
  std::string operator()(std::optional<c10::ScalarType>*) const { return "fp32, fp16 or bf16"; }
  std::string operator()(const EnumField& field) const { return choices_text(field.names); }
  std::string operator()(Value*) const { return limits.null_only ? "null" : "any JSON value"; }
  std::string operator()(Params*) const { return "object"; }

  std::string text() const { return limits.choices.empty() ? "text" : choices_text(limits.choices); }
};

struct ToValue {
  Value operator()(const EnumField& v) const { return v.names.at(v.get()); }
  Value operator()(const c10::ScalarType* v) const { return dtype_name(*v); }
  template <class T>
  Value operator()(const T* v) const {
    return *v;
  }
  template <class T>
  Value operator()(const std::optional<T>* v) const {
    return *v ? (*this)(&**v) : Value();
  }
  template <class T>
  Value operator()(const std::vector<T>* v) const {
    return List(v->begin(), v->end());
  }
};

bool within(double value, const Limits& limits) {
  return !std::isnan(value) && (limits.above ? value > limits.min : value >= limits.min) && value <= limits.max;
}

bool chosen(const std::string& value, const Limits& limits) {
  const auto& all = limits.choices;
  return all.empty() || std::find(all.begin(), all.end(), lower(value)) != all.end();
}

// Members come as the variant holds them: a const pointer here would lose against the template.
struct InLimits {
  const Limits& limits;
  bool operator()(int64_t* v) const { return within(double(*v), limits); }
  bool operator()(double* v) const { return std::isfinite(*v) && within(*v, limits); }
  bool operator()(std::string* v) const { return chosen(*v, limits); }
  bool operator()(std::optional<int64_t>* v) const { return !*v || (*this)(&**v); }
  bool operator()(std::optional<double>* v) const { return !*v || (*this)(&**v); }
  bool operator()(std::optional<std::string>* v) const { return !*v || (*this)(&**v); }
  bool operator()(std::vector<int64_t>* v) const {
    return std::all_of(v->begin(), v->end(), [](int64_t one) { return one > 0; });
  }
  template <class T>
  bool operator()(const T&) const {
    return true;
  }
};

}  // namespace

const Key* find_key(const std::string& path) {
  static const auto index = [] {
    std::unordered_map<std::string, const Key*> map;
    for (const Key& key : keys()) {
      map[key.path] = &key;
    }
    return map;
  }();
  const auto found = index.find(path);
  return found == index.end() ? nullptr : found->second;
}

const std::vector<std::string>& sections() {
  static const auto all = [] {
    std::set<std::string> out{""};
    for (const Key& key : keys()) {
      for (std::string s = parent_of(key.path); !s.empty(); s = parent_of(s)) {
        out.insert(s);
      }
    }
    return std::vector<std::string>(out.begin(), out.end());
  }();
  return all;
}

std::string canonical(const std::string& path) {
  const auto found = alias_map().find(path);
  return found == alias_map().end() ? path : found->second;
}

std::vector<std::string> names_in(const std::string& section) {
  std::vector<std::string> out;
  const auto add = [&](const std::string& path) {
    if (!path.empty() && parent_of(path) == section) {
      out.push_back(last_of(path));
    }
  };
  for (const Key& key : keys()) {
    add(key.path);
  }
  for (const std::string& name : sections()) {
    add(name);
  }
  for (const auto& [alias, path] : alias_map()) {
    add(alias);
  }
  for (const Legacy& key : legacy_keys()) {
    add(key.path);
  }
  if (section.empty()) {
    out.insert(out.end(), foreign_names().begin(), foreign_names().end());
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::string allowed(const Key& key) {
  Config unused;
  return std::visit(AllowedText{key.limits}, key.field(unused));
}

Value value_of(const Key& key, const Config& config) {
  // Rows hand out mutable members; this one only reads.
  Value value = std::visit(ToValue{}, key.field(const_cast<Config&>(config)));
  return value.is_null() && key.limits.takes_auto ? Value("auto") : value;
}

std::string value_text(const Key& key, const Config& config) {
  const Value value = value_of(key, config);
  return value.is_null() ? "unset" : value.text();
}

std::string dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "fp32";
    case c10::ScalarType::Half:
      return "fp16";
    case c10::ScalarType::BFloat16:
      return "bf16";
    default:
      return c10::toString(dtype);
  }
}

std::optional<c10::ScalarType> dtype_of(const std::string& name) {
  std::string text = lower(name);
  if (text.starts_with("torch.")) {
    text = text.substr(6);
  }
  static const std::unordered_map<std::string, c10::ScalarType> all{
      {"fp32", c10::ScalarType::Float},    {"float32", c10::ScalarType::Float},    {"float", c10::ScalarType::Float},
      {"fp16", c10::ScalarType::Half},     {"float16", c10::ScalarType::Half},     {"half", c10::ScalarType::Half},
      {"bf16", c10::ScalarType::BFloat16}, {"bfloat16", c10::ScalarType::BFloat16}};
  const auto found = all.find(text);
  return found == all.end() ? std::nullopt : std::optional(found->second);
}

void check_limits(const Config& config, Report& report) {
  for (const Key& key : keys()) {
    const Field field = key.field(const_cast<Config&>(config));
    if (!key.limits.checked_by_rule && !std::visit(InLimits{key.limits}, field)) {
      report.error(key.path, "must be " + allowed(key) + ", got " + value_text(key, config), Problem::Kind::Value);
    }
  }
}

std::string reference_table() {
  std::string out = "| key | takes | default | meaning |\n|---|---|---|---|\n";
  const Config defaults;
  for (const Key& key : keys()) {
    const std::string also = key.aliases.empty() ? "" : " (also `" + join(key.aliases, "`, `") + "`)";
    out += "| `" + key.path + "`" + also + " | " + allowed(key) + " | `" + value_text(key, defaults) + "` | " +
           key.meaning + (unread_row(key.path) != nullptr ? "; no effect, see docs/config_served.md" : "") + " |\n";
  }
  for (const Legacy& key : legacy_keys()) {
    out += "| `" + key.path + "` | - | `unset` | " + key.meaning + " |\n";
  }
  for (const std::string& name : foreign_names()) {
    out += "| `" + name + "` | object | `unset` | outside Tessera; " +
           (name == "aio" ? "a warning, no effect" : "refused when switched on") + " |\n";
  }
  return out;
}

}  // namespace tessera::config

#include "tessera/config/parse.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/config/convert.h"
#include "tessera/config/json.h"
#include "tessera/config/lookup.h"

namespace tessera::config {
namespace {

using Json = nlohmann::json;

template <class T>
bool contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

// Whether a section is on: "enabled" decides where a section has it; else an "enabled" deeper down; else a section with
// content is on.
bool switched_on(const Json& value) {
  if (!value.is_object()) {
    return !is_unset(value) && value != false && value != 0;
  }
  if (const auto found = value.find("enabled"); found != value.end()) {
    return switched_on(*found);
  }
  bool any_object = false, on = false;
  for (const auto& [name, one] : value.items()) {
    any_object |= one.is_object();
    on |= one.is_object() && switched_on(one);
  }
  return any_object ? on : !value.empty();
}

class Parser {
 public:
  Parser(Config& config, Report& report) : config_(config), report_(report) {}

  void read(const Json& root) {
    if (!root.is_object()) {
      report_.error("configuration", "must be an object with keys, got " + std::string(root.type_name()), kValue);
      return;
    }
    read_section(root, "", "");
    if (unknown_ > kNamed)
      report_.warning("configuration", "has " + std::to_string(unknown_ - kNamed) + " more unknown keys");
    apply_legacy();
  }

 private:
  static std::string child(const std::string& section, const std::string& name) {
    return section.empty() ? name : section + "." + name;
  }

  // `as`: the section as the user spells it.
  void read_section(const Json& object, const std::string& section, const std::string& as) {
    for (const auto& [name, value] : object.items()) {
      const std::string written = child(as, name);
      const std::string path = canonical(child(section, name));
      if (const Key* key = name.find('.') == std::string::npos ? find_key(path) : nullptr) {
        read_key(*key, written, value);
      } else if (!name.empty() && contains(sections(), path)) {
        open_section(path, written, value);
      } else if (is_legacy(path)) {
        legacy_[path] = &value;
      } else if (section.empty() && contains(foreign_names(), name)) {
        read_foreign(name, value);
      } else {
        unknown(section, name, written);
      }
    }
  }

  void read_key(const Key& key, const std::string& written, const Json& value) {
    if (is_unset(key, value)) {
      return;
    }
    const std::string before = value_text(key, config_);
    std::string warning;
    const std::string problem = assign(key, key.field(config_), value, warning);
    if (!problem.empty()) {
      report_.error(written, problem, kValue);
      return;
    }
    if (!warning.empty()) {
      report_.warning(written, warning);
    }
    const auto [earlier, first] = config_.given.emplace(key.path, written);
    if (!first && before != value_text(key, config_)) {
      report_.error(written, "differs from " + earlier->second + ", another spelling of the same key; keep one");
    }
  }

  void open_section(const std::string& path, const std::string& written, const Json& value) {
    const bool offload = path.starts_with("zero_optimization.offload_");
    if (is_unset(value) || (offload && value == false)) {
      return;
    }
    if (path == "zero_optimization" && value.is_boolean()) {
      config_.zero_optimization.stage = value.get<bool>() ? 1 : 0;
      config_.given["zero_optimization.stage"] = written;
      report_.warning(written, "true and false are deprecated; write {\"stage\": 1} or {\"stage\": 0}");
      return;
    }
    if (!value.is_object()) {
      report_.error(written, "must be an object with keys, got " + std::string(value.type_name()), kValue);
      return;
    }
    if (offload) {
      offload_given_.push_back(path);
    }
    read_section(value, path, written);
  }

  void read_foreign(const std::string& name, const Json& value) {
    if (!switched_on(value)) {
      return;
    }
    if (name == "aio") {
      report_.warning(name, "has no effect here");
      return;
    }
    config_.foreign_sections.push_back(name);
  }

  static bool is_legacy(const std::string& path) {
    const auto& all = legacy_keys();
    return std::any_of(all.begin(), all.end(), [&](const Legacy& key) { return key.path == path; });
  }

  void unknown(const std::string& section, const std::string& name, const std::string& written) {
    const bool warns = section.empty() || section == "optimizer" || section == "scheduler";
    if (++unknown_ > kNamed) {  // names near such a key cost time, and nobody reads so many
      if (!warns && !std::exchange(refused_more_, true))
        report_.error(written, "unknown key, and more of them", kUnknown);
      return;
    }
    const std::vector<std::string> near = all_nearest(name, names_in(section));
    const std::string hint = near.empty() ? "" : "; did you mean \"" + join(near, "\" or \"") + "\"?";
    if (!near.empty() && near_miss(name, near.front())) {
      report_.error(written, "unknown key" + hint, kUnknown);
    } else if (section.empty()) {
      report_.warning(written, "unknown key, ignored" + (hint.empty() ? elsewhere(name) : hint));
    } else if (warns) {
      report_.warning(written, "unknown key, ignored" + hint);  // as in the reference: parameters go into params
    } else if (section == "bf16" && contains(names_in("fp16"), name)) {
      report_.error(written, "unknown key; it belongs to fp16, bf16 needs no loss scale", kUnknown);
    } else {
      const auto names = names_in(section);
      const bool few = names.size() <= 12;
      const std::string list = few ? "; allowed are " + join(names, ", ") : "; see docs/config.md";
      report_.error(written, "unknown key" + (hint.empty() ? list : hint), kUnknown);
    }
  }

  // A key of some section that stands at the top level.
  static std::string elsewhere(const std::string& name) {
    for (const Key& key : keys()) {
      if (key.path == name || key.path.ends_with("." + name)) {
        const size_t dot = key.path.rfind('.');
        return "; write \"" + key.path.substr(dot + 1) + "\" inside \"" + key.path.substr(0, dot) + "\"";
      }
    }
    if (contains(std::vector<std::string>{"lr", "betas", "eps", "weight_decay", "momentum"}, name))
      return "; write \"" + name + "\" inside \"optimizer.params\"";
    return "";
  }

  const Json* take_legacy(const std::string& name) {
    const auto found = legacy_.find("zero_optimization." + name);
    return found == legacy_.end() || is_unset(*found->second) ? nullptr : found->second;
  }

  void apply_legacy() {
    legacy_offload("cpu_offload", "offload_optimizer", config_.zero_optimization.offload_optimizer.device);
    legacy_offload("cpu_offload_param", "offload_param", config_.zero_optimization.offload_param.device);
    if (take_legacy("cpu_offload_use_pin_memory")) {
      report_.warning("zero_optimization.cpu_offload_use_pin_memory",
                      "deprecated and ignored; use pin_memory inside the offload sections");
    }
    const std::string old = "zero_optimization.stage3_gather_fp16_weights_on_model_save";
    if (const Json* value = take_legacy("stage3_gather_fp16_weights_on_model_save")) {
      report_.warning(old, "deprecated; use stage3_gather_16bit_weights_on_model_save");
      read_key(*find_key("zero_optimization.stage3_gather_16bit_weights_on_model_save"), old, *value);
    }
    for (const char* name : {"zenflow", "zeropp_loco_param"}) {
      const Json* value = take_legacy(name);
      if (value && *value != false) {
        config_.foreign_sections.push_back(std::string("zero_optimization.") + name);
      }
    }
  }

  void legacy_offload(const std::string& name, const std::string& section, OffloadDevice& device) {
    const Json* value = take_legacy(name);
    if (!value) {
      return;
    }
    const std::string written = "zero_optimization." + name;
    if (!value->is_boolean()) {
      report_.error(written, "must be true or false; it is deprecated, use " + section + ".device", kValue);
    } else if (*value == true && contains(offload_given_, "zero_optimization." + section)) {
      report_.error(written, "cannot be combined with " + section + "; keep " + section);
    } else {
      report_.warning(written, "deprecated; use " + section + ".device");
      if (*value == true) {
        device = OffloadDevice::Cpu;
        config_.given["zero_optimization." + section + ".device"] = written;
      }
    }
  }

  static constexpr auto kUnknown = Problem::Kind::Unknown, kValue = Problem::Kind::Value;
  static constexpr int kNamed = 50;  // unknown keys that are named one by one
  Config& config_;
  int unknown_ = 0;
  bool refused_more_ = false;
  Report& report_;
  std::map<std::string, const Json*> legacy_;
  std::vector<std::string> offload_given_;
};

}  // namespace

Config parse(const Json& root, Report& report) {
  Config config;
  Parser(config, report).read(root);
  return config;
}

}  // namespace tessera::config

#include "tessera/engine/unit_policy.h"

#include <algorithm>
#include <set>

namespace tessera::engine {
namespace {

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

// The modules around `path`, from the nearest to the model.
std::vector<std::string> around(std::string path) {
  std::vector<std::string> all;
  while (!path.empty()) {
    path = parent_of(path);
    all.push_back(path);
  }
  return all;
}

// Containers with two children of one class that hold parameters.
std::set<std::string> repeating(const Outline& outline) {
  std::set<std::string> holding;
  for (const auto& param : outline.params)
    for (const std::string& path : around(param.path))
      holding.insert(path);
  std::set<std::pair<std::string, std::string>> seen;  // container, class of a child
  std::set<std::string> twice, result;
  for (const auto& module : outline.modules) {
    const std::string parent = parent_of(module.path);
    if (module.path.empty() || !holding.contains(module.path)) continue;
    if (!seen.emplace(parent, module.classes.front()).second) twice.insert(parent);
  }
  for (const auto& module : outline.modules)
    if (module.repeats && twice.contains(module.path)) result.insert(module.path);
  return result;
}

}  // namespace

UnitNames default_units(const Outline& outline) {
  const std::set<std::string> containers = repeating(outline);
  UnitNames units;
  for (const auto& param : outline.params) {
    std::string child = param.path;
    for (const std::string& path : around(param.path)) {  // the last hit is the outermost
      if (containers.contains(path) && child != param.path) units[param.path] = child;
      child = path;
    }
  }
  return units;
}

UnitNames partition_units(const Outline& outline, const UnitNames& units, const std::vector<std::string>& leaves) {
  const std::set<std::string> whole(leaves.begin(), leaves.end());
  UnitNames result = units;
  for (const auto& param : outline.params) {
    const std::string owner = parent_of(param.path);
    if (!owner.empty()) result.emplace(param.path, owner);
    for (const std::string& path : around(param.path))  // the last hit is the outermost
      if (whole.contains(path)) result[param.path] = path;
  }
  return result;
}

std::vector<int> modules_matching(const Outline& outline, LeafBy by, const std::string& text) {
  std::vector<int> found;
  for (size_t i = 0; i < outline.modules.size(); ++i) {
    const auto& [path, classes, repeats, runs] = outline.modules[i];
    const bool hit = by == LeafBy::Class  ? std::find(classes.begin(), classes.end(), text) != classes.end()
                     : by == LeafBy::Name ? path == text
                                          : path.ends_with(text);
    if (hit) found.push_back(static_cast<int>(i));
  }
  return found;
}

namespace {

// See configured_leaves().
std::vector<int> finer_than(const Outline& outline, int64_t threshold) {
  std::map<std::string, int64_t> modules, elements;  // inside, by path
  std::set<std::pair<std::string, int64_t>> counted;
  for (const auto& module : outline.modules) {
    ++modules[module.path];
    for (const std::string& path : around(module.path))
      ++modules[path];
  }
  for (const auto& param : outline.params)
    for (const std::string& path : around(param.path))
      if (counted.emplace(path, param.identity).second) elements[path] += param.elements;
  std::vector<int> found;
  for (size_t i = 0; i < outline.modules.size(); ++i) {
    const auto& module = outline.modules[i];
    const int64_t inside = modules[module.path], held = elements[module.path];
    if (module.path.empty() || !module.runs || inside == 1) continue;
    // The product is in floating point, as it may not fit an integer.
    if (held > 0 && static_cast<double>(held) <= static_cast<double>(threshold) * static_cast<double>(inside))
      found.push_back(static_cast<int>(i));
  }
  return found;
}

}  // namespace

Leaves configured_leaves(const Outline& outline, const config::ZeroOptimization& zero) {
  Leaves leaves;
  std::set<int> all;
  const auto add = [&](const std::vector<int>& found, const std::string& warning) {
    all.insert(found.begin(), found.end());
    if (found.empty() && !warning.empty()) leaves.warnings.push_back("[zero] " + warning);
  };
  const auto& section = zero.leaf_module;
  const auto defaults = config::LeafModule().classes;
  for (const std::string& item : section.classes) {
    const bool named = std::find(defaults.begin(), defaults.end(), item) == defaults.end();
    add(modules_matching(outline, LeafBy::Class, item),
        named ? "leaf_module.classes: no module of class " + item + " in the model" : "");
  }
  for (const std::string& item : section.names)
    add(modules_matching(outline, LeafBy::Name, item), "leaf_module.names: no module " + item + " in the model");
  for (const std::string& item : section.name_suffixes)
    add(modules_matching(outline, LeafBy::Suffix, item),
        "leaf_module.name_suffixes: no module " + item + " in the model");
  if (const int64_t threshold = zero.stage3_module_granularity_threshold; threshold > 0)
    add(finer_than(outline, threshold),
        "stage3_module_granularity_threshold: no module is finer than " + std::to_string(threshold));
  leaves.modules.assign(all.begin(), all.end());
  return leaves;
}

std::vector<std::string> outermost(const Outline& outline, const std::vector<int>& modules) {
  std::set<std::string> all;
  for (const int module : modules)
    all.insert(outline.modules.at(module).path);
  std::vector<std::string> result;
  for (const int module : modules) {
    const std::string& path = outline.modules[module].path;
    const auto outer = around(path);
    if (std::none_of(outer.begin(), outer.end(), [&](const auto& one) { return all.contains(one); }))
      result.push_back(path);
  }
  return result;
}

}  // namespace tessera::engine

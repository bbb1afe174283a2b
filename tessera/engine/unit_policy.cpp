#include "tessera/engine/unit_policy.h"

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

}  // namespace tessera::engine

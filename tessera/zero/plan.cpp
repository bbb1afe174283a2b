#include "tessera/zero/plan.h"

#include <algorithm>
#include <unordered_map>

#include "tessera/base/error.h"

namespace tessera::zero {

namespace {

std::vector<PlannedUnit> by_name(const std::vector<PlanItem>& items) {
  std::vector<PlannedUnit> units;
  PlannedUnit root{kRootUnit, {}};
  std::unordered_map<std::string, size_t> index;
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string& name = items[i].unit;
    if (name.empty() || name == kRootUnit) {
      root.items.push_back(static_cast<int>(i));
      continue;
    }
    const auto [at, added] = index.emplace(name, units.size());
    if (added) units.push_back({name, {}});
    units[at->second].items.push_back(static_cast<int>(i));
  }
  if (!root.items.empty()) units.push_back(std::move(root));
  return units;
}

int64_t elements(const PlannedUnit& unit, const std::vector<PlanItem>& items) {
  int64_t sum = 0;
  for (const int i : unit.items)
    sum += items[i].numel;
  return sum;
}

std::vector<PlannedUnit> merge_small(std::vector<PlannedUnit> units, const std::vector<PlanItem>& items,
                                     int64_t min_elements, int64_t max_elements) {
  std::vector<PlannedUnit> merged;
  std::string first;
  int64_t size = 0;
  for (PlannedUnit& unit : units) {
    const int64_t more = elements(unit, items);
    const bool joins = !merged.empty() && size < min_elements && size + more <= max_elements && unit.name != kRootUnit;
    if (!joins) {
      first = unit.name;
      size = more;
      merged.push_back(std::move(unit));
      continue;
    }
    PlannedUnit& last = merged.back();
    last.items.insert(last.items.end(), unit.items.begin(), unit.items.end());
    last.name = first + ".." + unit.name;
    size += more;
  }
  return merged;
}

std::vector<PlannedUnit> split_large(std::vector<PlannedUnit> units, const std::vector<PlanItem>& items,
                                     int64_t max_elements) {
  std::vector<PlannedUnit> result;
  for (PlannedUnit& unit : units) {
    if (elements(unit, items) <= max_elements) {
      result.push_back(std::move(unit));
      continue;
    }
    int64_t size = 0;
    int part = 0;
    for (const int i : unit.items) {
      if (part == 0 || size + items[i].numel > max_elements) {
        result.push_back({unit.name + "#" + std::to_string(part++), {}});
        size = 0;
      }
      result.back().items.push_back(i);
      size += items[i].numel;
    }
  }
  return result;
}

}  // namespace

std::vector<PlannedUnit> plan_units(const std::vector<PlanItem>& items, int64_t min_elements, int64_t max_elements) {
  TESSERA_CHECK_VALUE(min_elements >= 0 && max_elements >= 0, "zero.plan", "unit sizes must not be negative");
  auto units = by_name(items);
  units = merge_small(std::move(units), items, min_elements, max_elements);
  units = split_large(std::move(units), items, max_elements);
  for (PlannedUnit& unit : units) {
    std::stable_sort(unit.items.begin(), unit.items.end(),
                     [&](int a, int b) { return items[a].group < items[b].group; });
  }
  return units;
}

}  // namespace tessera::zero

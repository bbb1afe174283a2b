#include "tessera/zero/plan.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include "tessera/base/error.h"

namespace tessera::zero {

namespace {

std::string name_of(const PlanItem& item) {
  constexpr std::array suffixes{"", " (resident)", " (frozen)"};
  const std::string name = item.unit.empty() ? kRootUnit : item.unit;
  return name + suffixes.at(static_cast<size_t>(item.kind)) + item.travels;
}

std::vector<PlannedUnit> by_name(const std::vector<PlanItem>& items) {
  std::vector<PlannedUnit> units;
  std::unordered_map<std::string, size_t> index;
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string name = name_of(items[i]);
    const auto [at, added] = index.emplace(name, units.size());
    const bool root = items[i].unit.empty() || items[i].unit == kRootUnit;
    if (added) units.push_back({name, items[i].kind, items[i].travels, root, {}});
    units[at->second].items.push_back(static_cast<int>(i));
  }
  std::stable_partition(units.begin(), units.end(), [](const PlannedUnit& u) { return !u.root; });
  return units;
}

int64_t elements(const PlannedUnit& unit, const std::vector<PlanItem>& items) {
  int64_t sum = 0;
  for (const int i : unit.items)
    sum += items[i].numel;
  return sum;
}

// Neighbours are the units next to each other among those of one kind.
std::vector<PlannedUnit> merge_small(std::vector<PlannedUnit> units, const std::vector<PlanItem>& items,
                                     int64_t min_elements, int64_t max_elements) {
  struct Open {
    size_t at = 0;
    std::string first;
    int64_t size = 0;
  };
  std::vector<PlannedUnit> merged;
  std::unordered_map<std::string, Open> last;  // by kind
  for (PlannedUnit& unit : units) {
    const int64_t more = elements(unit, items);
    const std::string kind = std::to_string(unit.kind) + unit.travels;
    const auto found = last.find(kind);
    if (found == last.end() || found->second.size >= min_elements || found->second.size + more > max_elements ||
        unit.root) {
      last[kind] = {merged.size(), unit.name, more};
      merged.push_back(std::move(unit));
      continue;
    }
    Open& open = found->second;
    PlannedUnit& target = merged[open.at];
    target.items.insert(target.items.end(), unit.items.begin(), unit.items.end());
    target.name = open.first + ".." + unit.name;
    open.size += more;
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
        result.push_back({unit.name + "#" + std::to_string(part++), unit.kind, unit.travels, unit.root, {}});
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

bool ShareTaken::take(int64_t size, double share) {
  seen += size;
  const bool takes = static_cast<double>(taken + size) <= share * static_cast<double>(seen);
  if (takes) taken += size;
  return takes;
}

}  // namespace tessera::zero

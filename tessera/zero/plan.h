// Which parameters form a unit. Pure arithmetic over names and sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::zero {

// The unit of everything that no repeated block owns (embeddings, heads). Never merged with others: its gradients
// are complete last.
inline constexpr const char* kRootUnit = "root";

struct PlanItem {
  std::string unit;  // unit the front end asks for; empty: root
  int64_t numel = 0;
  int group = 0;          // optimizer group
  int kind = 0;           // 0, 1, ...: parameters of different kinds (partitioned, resident, frozen) never share a unit
  std::string travels{};  // parameters that travel in different dtypes share none; a note for names, often empty
};

struct PlannedUnit {
  std::string name;
  int kind = 0;
  std::string travels;
  bool root = false;       // kRootUnit, or a part of it
  std::vector<int> items;  // indices, in layout order: by optimizer group, then in the order given
};

// Units in forward order (order of first appearance, root last). Neighbouring units below `min_elements` are merged up
// to `max_elements`; a unit above `max_elements` is split between parameters. Every item is in exactly one unit.
// Ordering by group makes one fused update per group and unit, however the groups interleave in the model.
std::vector<PlannedUnit> plan_units(const std::vector<PlanItem>& items, int64_t min_elements, int64_t max_elements);

// Takes units one after the other, so that no more than a share of the elements seen so far were taken.
struct ShareTaken {
  int64_t taken = 0, seen = 0;
  bool take(int64_t size, double share);
};

}  // namespace tessera::zero

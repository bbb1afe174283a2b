// Which layers a part of a pipeline has.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::pipeline {

// Value error for ranks that cannot be so many stages of equal size.
void check_stages(int ranks, int stages);

// Boundaries [0, ..., n] of `parts` runs of neighbours among n weights, of which the heaviest is as light as can be; of two
// such cuts the one whose later parts are fuller. No part is empty: value error for fewer weights than parts.
std::vector<int> split(const std::vector<double>& weights, int parts);

// The layers of a whole model, which nobody need have built.
struct ListedLayers {
  using Predicate = std::function<bool(const std::string& class_name)>;

  int count = 0;
  std::function<int64_t(int layer)> trained_elements;
  std::function<std::string(int layer)> class_name;
  // Whether a regular expression finds something in a name, whatever its letter case; throws where it is none.
  std::function<Predicate(const std::string& pattern)> matcher;
};

// Value error for a module that is in two places of a list. `modules`: null for a place that is none, or not built. `remedy`: how
// the caller writes layers that share their weights.
void check_listed_once(const std::vector<const void*>& modules, const std::function<std::string(int layer)>& class_name,
                       const std::string& remedy);

// Boundaries as split() gives them of `parts` runs of layers: "uniform" (numbers of layers), "parameters" (of trained elements) or
// "type:REGEX" (of layers whose class the expression finds). Value error for another method, and for a type that is in fewer layers
// than there are parts. Local.
std::vector<int> bounds_of(const std::string& method, int parts, const ListedLayers& layers);

}  // namespace tessera::pipeline

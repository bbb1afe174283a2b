// Which layers a part of a pipeline has.
#pragma once

#include <vector>

namespace tessera::pipeline {

// Boundaries [0, ..., n] of `parts` runs of neighbours among n weights, of which the heaviest is as light as can be; of two
// such cuts the one whose later parts are fuller. No part is empty: value error for fewer weights than parts.
std::vector<int> split(const std::vector<double>& weights, int parts);

}  // namespace tessera::pipeline

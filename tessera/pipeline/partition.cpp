#include "tessera/pipeline/partition.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tessera/base/error.h"

namespace tessera::pipeline {

std::vector<int> split(const std::vector<double>& weights, int parts) {
  const int count = static_cast<int>(weights.size());
  TESSERA_CHECK_VALUE(count >= parts, "pipeline", count, " layers cannot be cut into ", parts,
                      " parts; use fewer stages or chunks");
  std::vector<double> sums(count + 1, 0.0);
  std::partial_sum(weights.begin(), weights.end(), sums.begin() + 1);
  // best[i]: the least possible heaviest part of the first i layers in the parts so far.
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<double> best = sums;
  best[0] = kNever;
  std::vector<std::vector<int>> cuts;
  for (int part = 2; part <= parts; ++part) {
    std::vector<double> now(count + 1, kNever);
    std::vector<int> cut(count + 1, 0);
    for (int end = part; end <= count; ++end) {
      for (int begin = part - 1; begin < end; ++begin) {
        const double heaviest = std::max(best[begin], sums[end] - sums[begin]);
        if (heaviest < now[end]) now[end] = heaviest, cut[end] = begin;
      }
    }
    best = std::move(now);
    cuts.push_back(std::move(cut));
  }
  std::vector<int> bounds{count};
  for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut)
    bounds.push_back((*cut)[bounds.back()]);
  bounds.push_back(0);
  std::reverse(bounds.begin(), bounds.end());
  return bounds;
}

}  // namespace tessera::pipeline

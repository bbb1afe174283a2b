#include "tessera/pipeline/partition.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <numeric>
#include <set>
#include <unordered_set>

#include "tessera/base/error.h"

namespace tessera::pipeline {

void check_stages(int ranks, int stages) {
  TESSERA_CHECK_VALUE(
      stages >= 1 && ranks % stages == 0, "pipeline", ranks, " ranks cannot be ", stages, " stages of equal size",
      stages >= 1 ? c10::str("; start a multiple of ", stages, " ranks, or take another number of stages")
                  : std::string("; a pipeline has 1 stage at least"));
}

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

namespace {

std::vector<double> weights_by_type(const std::string& method, int parts, const ListedLayers& layers) {
  const ListedLayers::Predicate finds = layers.matcher(method.substr(method.find(':') + 1));
  std::vector<double> weights;
  std::set<std::string> names;
  int found = 0;
  for (int layer = 0; layer < layers.count; ++layer) {
    const std::string name = layers.class_name(layer);
    const bool here = finds(name);
    weights.push_back(here ? 1 : 0);
    found += here ? 1 : 0;
    names.insert(name);
  }
  std::string text;
  for (const std::string& name : names)
    text += (text.empty() ? "" : ", ") + name;
  TESSERA_CHECK_VALUE(found >= parts, "pipeline", "partition method '", method, "' finds ", found, " layers for ",
                      parts, " parts; the layers are ", text);
  return weights;
}

}  // namespace

void check_listed_once(const std::vector<const void*>& modules, const std::function<std::string(int layer)>& class_name,
                       const std::string& remedy) {
  std::unordered_set<const void*> seen;
  for (int layer = 0; layer < static_cast<int>(modules.size()); ++layer)
    TESSERA_CHECK_VALUE(modules[layer] == nullptr || seen.insert(modules[layer]).second, "pipeline", "layer ", layer,
                        " (", class_name(layer), ") is in the list twice; ", remedy);
}

std::vector<int> bounds_of(const std::string& method, int parts, const ListedLayers& layers) {
  std::string wanted = method;
  std::ranges::transform(wanted, wanted.begin(), [](unsigned char c) { return std::tolower(c); });
  std::vector<double> weights(layers.count, 1.0);
  if (wanted == "uniform") return split(weights, parts);
  if (wanted.starts_with("type:")) {
    weights = weights_by_type(method, parts, layers);
  } else {
    TESSERA_CHECK_VALUE(wanted == "parameters", "pipeline", "there is no partition method '", method,
                        "'; use 'uniform', 'parameters' or 'type:REGEX'");
    for (int layer = 0; layer < layers.count && parts > 1; ++layer)
      weights[layer] = static_cast<double>(layers.trained_elements(layer));
  }
  // Layers without parameters are shared out, too, where nothing else decides.
  for (double& weight : weights)
    weight += 1e-6;
  return split(weights, parts);
}

}  // namespace tessera::pipeline

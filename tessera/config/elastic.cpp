#include "tessera/config/elastic.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

namespace tessera::config {
namespace {

constexpr double kByRanks = 0.1, kByNodes = 0.2;  // by version
constexpr int64_t kMostComposite = 720'720;       // the largest factor of a batch
constexpr const char* kPath = "elasticity";

using Numbers = std::vector<int64_t>;

// What a job grows by.
struct Node {
  int64_t devices = 1, ranks = 1;  // ranks: data-parallel ones
};

Node node_of(const Elasticity& section) {
  if (section.version == kByRanks) return {};
  return {section.num_gpus_per_node, section.num_gpus_per_node / section.model_parallel_size};
}

// Appends `number` and its products with further primes, each at most as often as the one before: number and divisors. No other
// number can be highly composite.
void extend(int64_t number, int64_t divisors, size_t prime, int most, int64_t limit,
            std::vector<std::pair<int64_t, int64_t>>& found) {
  constexpr std::array<int64_t, 9> primes{2, 3, 5, 7, 11, 13, 17, 19, 23};
  found.emplace_back(number, divisors);
  if (prime == primes.size()) return;
  for (int power = 1; power <= most && number <= limit / primes[prime]; ++power) {
    number *= primes[prime];
    extend(number, divisors * (power + 1), prime + 1, power, limit, found);
  }
}

// The least common multiple, where it is at most `most`.
std::optional<int64_t> multiple_of(const Numbers& numbers, int64_t most) {
  int64_t found = 1;
  for (const int64_t number : numbers) {
    const int64_t factor = number / std::gcd(found, number);
    if (found > most / factor) return std::nullopt;
    found *= factor;
  }
  return found;
}

std::set<int64_t> candidates(const Numbers& micro_batches, int64_t most) {
  const Numbers composite = highly_composite(std::min(most / *std::ranges::min_element(micro_batches), kMostComposite));
  Numbers bases = micro_batches;
  if (const auto multiple = multiple_of(micro_batches, most)) bases.push_back(*multiple);
  std::set<int64_t> found;
  for (const int64_t base : bases) {
    const auto above = std::ranges::upper_bound(composite, most / base);
    if (above != composite.begin()) found.insert(base * *std::prev(above));
  }
  return found;
}

// The numbers of ranks, from `least` to `most`, that `batch` can be divided over.
Numbers fitting(int64_t batch, const Numbers& micro_batches, int64_t least, int64_t most) {
  std::set<int64_t> found;
  for (const int64_t micro : micro_batches) {
    if (batch % micro != 0) continue;
    const int64_t products = batch / micro;  // ranks * accumulation
    for (int64_t n = 1; n <= products / n; ++n) {
      if (products % n != 0) continue;
      for (const int64_t ranks : {n, products / n})
        if (ranks >= least && ranks <= most) found.insert(ranks);
    }
  }
  return {found.begin(), found.end()};
}

// The best batch, with a node's ranks as one.
ElasticBatch best_of(const Elasticity& section) {
  const Node node = node_of(section);
  const int64_t most = section.max_train_batch_size / node.ranks;
  const int64_t least = std::max<int64_t>(1, section.min_gpus / node.devices);
  ElasticBatch best;
  for (const int64_t batch : candidates(section.micro_batch_sizes, most)) {  // the smaller first
    Numbers ranks = fitting(batch, section.micro_batch_sizes, least, section.max_gpus / node.devices);
    const bool as_many = ranks.size() == best.ranks.size() && section.prefer_larger_batch;
    if (!ranks.empty() && (ranks.size() > best.ranks.size() || as_many)) best = {batch, std::move(ranks)};
  }
  best.train_batch_size *= node.ranks;
  for (int64_t& ranks : best.ranks)
    ranks *= node.ranks;
  return best;
}

std::string shown(const Numbers& numbers) {
  std::string text;
  for (const int64_t number : numbers)
    text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

void check_node(const Elasticity& section, Report& report) {
  const auto refuse = [&](bool bad, const char* name, const std::string& text) {
    if (bad) report.error(std::string(kPath) + "." + name, text);
  };
  const std::string node = "num_gpus_per_node " + std::to_string(section.num_gpus_per_node);
  const bool by_ranks = section.version == kByRanks, by_nodes = section.version == kByNodes;
  refuse(!by_ranks && !by_nodes, "version", "must be 0.1 or 0.2");
  refuse(by_ranks && section.model_parallel_size > 1, "model_parallel_size", "above 1 needs version 0.2");
  const bool divides = section.num_gpus_per_node % section.model_parallel_size == 0;
  refuse(by_nodes && !divides, "model_parallel_size", "does not divide " + node);
  refuse(by_nodes && section.max_gpus < section.num_gpus_per_node, "max_gpus", "is less than a node, " + node);
}

void check_section(const Config& config, Report& report) {
  const Elasticity& section = config.elasticity;
  const size_t before = report.errors().size();
  const auto refuse = [&](bool bad, const char* name, const std::string& text) {
    if (bad) report.error(std::string(kPath) + "." + name, text);
  };
  refuse(section.micro_batch_sizes.empty(), "micro_batch_sizes", "is empty");
  refuse(section.min_gpus > section.max_gpus, "min_gpus",
         "is larger than max_gpus " + std::to_string(section.max_gpus));
  check_node(section, report);
  const bool batch =
      config.train_batch_size || config.train_micro_batch_size_per_gpu || config.gradient_accumulation_steps;
  if (batch && !section.ignore_non_elastic_batch_info)
    report.error(
        kPath,
        "train_batch_size, train_micro_batch_size_per_gpu or gradient_accumulation_steps beside it: leave them "
        "out, or set ignore_non_elastic_batch_info");
  if (report.errors().size() != before || std::ranges::min(section.micro_batch_sizes) < 1) return;
  const int64_t ranks = node_of(section).ranks, most = section.max_train_batch_size / ranks;
  if (std::ranges::max(section.micro_batch_sizes) > most) {
    refuse(true, "micro_batch_sizes",
           "must be at most " + std::to_string(most) + ", max_train_batch_size / " + std::to_string(ranks) +
               " ranks of a node");
  } else if (best_of(section).ranks.empty()) {
    report.error(kPath, "no batch within max_train_batch_size in micro-batches of " + shown(section.micro_batch_sizes) +
                            " fits min_gpus to max_gpus devices, in nodes of " +
                            std::to_string(node_of(section).devices));
  }
}

}  // namespace

Numbers highly_composite(int64_t limit) {
  std::vector<std::pair<int64_t, int64_t>> all;
  if (limit >= 1) extend(1, 1, 0, 64, limit, all);
  std::ranges::sort(all);
  Numbers found;
  int64_t best = 0;
  for (const auto& [number, divisors] : all) {
    if (divisors <= best) continue;
    found.push_back(number);
    best = divisors;
  }
  return found;
}

ElasticBatch elastic_batch(const Config& config) {
  Report report;
  check_section(config, report);
  report.raise();
  return best_of(config.elasticity);
}

Numbers elastic_micro_batches(const Config& config, int64_t ranks) {
  const ElasticBatch batch = elastic_batch(config);
  if (std::ranges::find(batch.ranks, ranks) == batch.ranks.end()) {
    Report report;
    report.error(kPath,
                 std::to_string(ranks) + " data-parallel ranks do not fit the batch of " +
                     std::to_string(batch.train_batch_size) + " samples; these do: " + shown(batch.ranks),
                 Problem::Kind::Ranks);
    report.raise();
  }
  Numbers found;
  std::ranges::copy_if(config.elasticity.micro_batch_sizes, std::back_inserter(found),
                       [&](int64_t micro) { return batch.train_batch_size % (micro * ranks) == 0; });
  return found;
}

void check_elasticity(const Config& config, Report& report) {
  if (config.elasticity.enabled) check_section(config, report);
}

}  // namespace tessera::config

#include "tessera/config/config.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/checkpoint/node.h"
#include "tessera/config/elastic.h"
#include "tessera/config/json.h"
#include "tessera/config/json_text.h"
#include "tessera/config/lookup.h"
#include "tessera/config/parse.h"
#include "tessera/config/rules.h"
#include "tessera/config/source.h"

namespace tessera::config {
namespace {

// Parses and validates in one pass, so that one error names everything.
Config finish(const nlohmann::json& root, Report& report) {
  Config config = parse(root, report);
  check_limits(config, report);
  check_rules(config, report);
  report.raise();
  config.warnings = report.warnings();
  return config;
}

constexpr auto kRanks = Problem::Kind::Ranks;
constexpr const char* kBatch = "batch";

void require(bool good, const char* path, const std::string& text, Problem::Kind kind = Problem::Kind::Rule) {
  if (good) return;
  Report report;
  report.error(path, text, kind);
  report.raise();
}

std::optional<int64_t> times(std::optional<int64_t> a, int64_t b) {
  const bool fits = a && (b == 0 || *a <= std::numeric_limits<int64_t>::max() / b);
  return fits ? std::optional(*a * b) : std::nullopt;
}

std::string shown(const std::optional<int64_t>& value) {
  return value ? std::to_string(*value) : "?";
}

// The tree of all keys whose path begins with `prefix`, or of those that were given.
Params tree_of(const Config& config, const std::string& prefix, bool all = true) {
  Params tree;
  for (const Key& key : keys()) {
    if (!key.path.starts_with(prefix) || (!all && !config.given.contains(key.path))) continue;
    Params* at = &tree;
    size_t from = prefix.size();
    for (size_t dot; (dot = key.path.find('.', from)) != std::string::npos; from = dot + 1)
      at = &std::get<Params>(at->emplace(key.path.substr(from, dot - from), Params()).first->second.data);
    at->emplace(key.path.substr(from), value_of(key, config));
  }
  return tree;
}

}  // namespace

Config from_value(const nlohmann::json& value) {
  Report report;
  return finish(value, report);
}

Config Config::from_json(const std::string& text) {
  Report report;
  const nlohmann::json root = read_json(text, report);
  return finish(root, report);
}

Config Config::from_file(const std::string& path) {
  Report report;
  const nlohmann::json root = read_json(text_of_file(path), report, path);
  return finish(root, report);
}

void Config::validate() const {
  Report report;
  check_limits(*this, report);
  check_rules(*this, report);
  report.raise();
}

Batch Config::resolve_batch(int64_t data_parallel_size) const {
  const int64_t world = data_parallel_size;
  require(world >= 1, kBatch, "the data-parallel size must be >= 1, got " + std::to_string(world), kRanks);
  if (elasticity.enabled) {
    const int64_t samples = elastic_batch(*this).train_batch_size;
    const int64_t most = std::ranges::max(elastic_micro_batches(*this, world));
    return {samples, most, samples / (most * world)};
  }
  const auto &total = train_batch_size, &micro = train_micro_batch_size_per_gpu, &steps = gradient_accumulation_steps;
  const std::string given =
      "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
      "data-parallel size: " +
      shown(total) + " = " + shown(micro) + " * " + shown(steps) + " * " + std::to_string(world);
  require(total || micro, kBatch,
          "the batch size is open; give train_batch_size or train_micro_batch_size_per_gpu. " + given);
  require(total.value_or(1) > 0 && micro.value_or(1) > 0 && steps.value_or(1) > 0, kBatch,
          "batch sizes must be >= 1. " + given);
  Batch out;
  out.gradient_accumulation_steps = steps ? *steps : total && micro ? *total / *micro / world : 1;
  const int64_t parts = std::max<int64_t>(1, out.gradient_accumulation_steps);
  out.micro_batch_size = micro ? *micro : *total / world / parts;
  const auto product = times(times(out.micro_batch_size, out.gradient_accumulation_steps), world);
  require(
      product && *product <= checkpoint::Node::kLargestCount && total.value_or(1) <= checkpoint::Node::kLargestCount,
      kBatch, "the batch is too large: more than 2^52 samples, up to which they are counted. " + given);
  out.train_batch_size = total ? *total : *product;
  // A quotient of zero makes the product zero too, so this also refuses batches smaller than the
  // world.
  require(out.train_batch_size > 0 && product == out.train_batch_size, kBatch,
          c10::str("the batch sizes do not fit. ", given, "; found ", out.train_batch_size,
                   " != ", out.micro_batch_size, " * ", out.gradient_accumulation_steps, " * ", world),
          kRanks);
  return out;
}

Value Config::get(const std::string& path) const {
  std::string at;  // the canonical spelling so far
  std::istringstream parts(path);
  for (std::string name; std::getline(parts, name, '.');) {
    const std::string section = at;
    at = canonical(section.empty() ? name : section + "." + name);
    const bool is_section = std::find(sections().begin(), sections().end(), at) != sections().end();
    if (is_section || (find_key(at) != nullptr && parts.eof())) continue;
    const std::string near = nearest(name, names_in(section));
    TESSERA_CHECK_VALUE(false, "config", "there is no key '", path, "'",
                        near.empty() || near == name
                            ? "; see docs/config.md"
                            : "; did you mean '" + (section.empty() ? "" : section + ".") + near + "'?");
  }
  if (const Key* key = find_key(at)) return value_of(*key, *this);
  return tree_of(*this, at.empty() ? "" : at + ".");
}

Params Config::to_dict(bool all) const {
  return tree_of(*this, "", all);
}

std::string Config::describe(bool all) const {
  const Config defaults;
  std::string out;
  for (const Key& key : keys()) {
    const std::string value = value_text(key, *this);
    const bool set = given.contains(key.path) || value != value_text(key, defaults);
    if (set) {
      const auto spelling = given.find(key.path);
      const bool renamed = spelling != given.end() && spelling->second != key.path;
      out += key.path + " = " + value + " (given" + (renamed ? " as " + spelling->second : "") + ")\n";
    } else if (all) {
      const bool batch = &key - keys().data() < 3;  // the triple comes first
      out += key.path + " = " + value + (batch ? " (derived by resolve_batch)" : " (default)") + "\n";
    }
  }
  return out;
}

}  // namespace tessera::config

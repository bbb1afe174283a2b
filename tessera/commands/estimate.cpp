#include "tessera/config/estimate.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/commands/table.h"
#include "tessera/config/served.h"
#include "tessera/config/source.h"
#include "tessera/config/text.h"

namespace tessera::commands {

namespace {

using config::Estimate;

constexpr const char* kDefault = R"({"bf16": {"enabled": true}, "optimizer": {"type": "Adam"}})";
constexpr double kGiga = 1e9;

// The number of a text like 7B, 350M, 1.5T or a plain one. Nothing for another text.
std::optional<int64_t> parameters_of(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc() || !(value > 0)) return std::nullopt;
  const std::string unit = config::lower(text.substr(static_cast<size_t>(end - text.data())));
  const double scale = unit == "k"    ? 1e3
                       : unit == "m"  ? 1e6
                       : unit == "b"  ? 1e9
                       : unit == "t"  ? 1e12
                       : unit.empty() ? 1
                                      : 0;
  if (scale == 0 || value * scale > 1e18) return std::nullopt;
  return std::llround(value * scale);
}

config::ModelSizes sizes_of(const std::string& model, const Config& config, const FrontEnd& front) {
  if (const auto count = parameters_of(model)) return config::sizes_of(*count, config);
  TESSERA_CHECK_BUILT(
      front.sizes_of, "estimate", "a model from '", model,
      "' is built by Python: use the command `tessera` of the Python package, or give a number like 7B");
  return front.sizes_of(model, config);
}

// A list of problems as one line, without its head.
std::string reason(const std::string& text) {
  const size_t head = text.find('\n');
  if (head == std::string::npos) return text;
  std::string line;
  for (size_t from = head + 1; from < text.size();) {
    const size_t end = std::min(text.find('\n', from), text.size());
    const size_t first = text.find_first_not_of(" \t", from);
    if (first < end) line += (line.empty() ? "" : "; ") + text.substr(first, end - first);
    from = end + 1;
  }
  return line.empty() ? text.substr(0, head) : line;
}

std::string cells(const std::vector<int64_t>& bytes) {
  std::string line;
  char cell[32];
  for (const int64_t value : bytes) {
    std::snprintf(cell, sizeof cell, " %10.2f", static_cast<double>(value) / kGiga);
    line += cell;
  }
  return line;
}

std::string row(const Config& config, int64_t stage, int64_t ranks, bool away, const std::string& model,
                const FrontEnd& front, bool& served) {
  char head[32];
  std::snprintf(head, sizeof head, "%6lld %6lld", static_cast<long long>(ranks), static_cast<long long>(stage));
  std::string problem;
  try {
    const Config of_stage = config::with_stage(config, stage);
    const Estimate found = config::estimate(sizes_of(model, of_stage, front), of_stage, static_cast<int>(ranks));
    std::vector<int64_t> bytes{found.params, found.grads, found.states, found.gathered, found.total()};
    if (away) bytes.insert(bytes.end(), {found.host, found.disk});
    served = true;
    return head + cells(bytes) + "\n";
  } catch (const c10::ValueError& error) {
    problem = error.what_without_backtrace();
  } catch (const c10::NotImplementedError& error) {
    problem = error.what_without_backtrace();
  }
  return std::string(head) + " refused: " + reason(problem) + "\n";
}

void estimate(const Arguments& given, const FrontEnd& front, Result& result) {
  const std::string model = given.text("model");
  std::error_code ignored;
  const bool known = parameters_of(model) || std::filesystem::exists(model, ignored);
  if (!known) {  // beside what is wrong with the configuration
    result.errors = "[estimate] '" + model + "' is no number of parameters, like 7B or 350M" +
                    (front.sizes_of ? ", and no file or folder that exists\n" : "\n");
  }
  const std::vector<int64_t> all =
      given.has("--ranks") ? given.numbers("--ranks", 1) : std::vector<int64_t>{1, 2, 4, 8};
  const Config config = config::config_of(given.has("--config") ? given.text("--config") : kDefault);
  config::check_served(config);
  if (!known) {
    result.code = 1;
    return;
  }
  sizes_of(model, config, front);  // a model that cannot be built is an error, not a row
  const config::ZeroOptimization& zero = config.zero_optimization;
  const bool away = zero.offload_optimizer.device != config::OffloadDevice::None ||
                    zero.offload_param.device != config::OffloadDevice::None;
  result.output = " ranks  stage";
  for (const char* name : {"params", "grads", "states", "gathered", "total", "host", "disk"}) {
    if (!away && std::string(name) == "host") break;
    result.output += std::string(11 - std::string(name).size(), ' ') + name;
  }
  result.output += "  (GB)\n";
  bool served = false;
  for (const int64_t ranks : all)
    for (int64_t stage = 0; stage < 4; ++stage)
      result.output += row(config, stage, ranks, away, model, front, served);
  if (!served) result.code = 1;
}

}  // namespace

Command estimate_command(const FrontEnd& front) {
  const char* const model = front.sizes_of
                                ? "a number of parameters (7B), or a folder or file of a Hugging Face configuration"
                                : "a number of parameters (7B)";
  return {{.command = "estimate",
           .summary = "What a rank holds of model states, in GB, by ZeRO stage and number of ranks.",
           .needed = {{"model", model}},
           .options = {{"--config", "of Tessera or DeepSpeed; default: bf16 with Adam", "CONFIG"},
                       {"--ranks", "all ranks of the job; default: 1 2 4 8", "N", true}}},
          estimate};
}

}  // namespace tessera::commands

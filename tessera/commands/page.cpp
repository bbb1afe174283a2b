#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/commands/numbers.h"
#include "tessera/commands/page_html.h"
#include "tessera/commands/table.h"
#include "tessera/io/file.h"

namespace tessera::commands {

namespace {

using nlohmann::json;

constexpr size_t kMostPoints = 1000;  // of a line
constexpr const char* kSteps = "Train/Samples/global_steps";
constexpr const char* kSkipped = "Train/Samples/skipped_steps";

// Adds a line to the warnings for steps that were skipped.
void note_skipped(Run& run) {
  const auto found = run.series.find(kSkipped);
  if (found == run.series.end()) return;
  double before = 0;
  for (const auto& [at, skipped] : found->second) {
    if (skipped.value_or(before) > before)
      run.warnings.emplace_back(at, "the update was skipped: inf or NaN in a gradient");
    before = skipped.value_or(before);
  }
  std::ranges::stable_sort(run.warnings, {}, [](const auto& warning) { return warning.first; });
}

// Counts optimizer steps in place of samples.
void count_steps(Run& run) {
  const Run::Points steps = run.series.at(kSteps);
  const auto step_at = [&](double samples) {
    const auto after = std::ranges::upper_bound(steps, samples, {}, [](const auto& point) { return point.first; });
    return after == steps.begin() ? 0 : std::prev(after)->second.value_or(0);
  };
  for (auto& [name, points] : run.series)
    for (auto& [at, value] : points)
      at = step_at(at);
  for (auto& [at, text] : run.warnings)
    at = step_at(at);
}

// Merges neighbours into their mean, so that no more than kMostPoints are left; a group with a value that is not finite has none.
json points_of(const Run::Points& points) {
  const size_t together = (points.size() + kMostPoints - 1) / kMostPoints;
  json found = json::array();
  for (size_t begin = 0; begin < points.size(); begin += together) {
    const size_t end = std::min(points.size(), begin + together);
    double sum = 0;
    bool finite = true;
    for (size_t i = begin; i < end; ++i) {
      finite = finite && points[i].second;
      sum += points[i].second.value_or(0);
    }
    const json mean = finite ? json(sum / static_cast<double>(end - begin)) : json();
    found.push_back({points[end - 1].first, mean});
  }
  return found;
}

json run_of(const Run& run, double samples) {
  json series = json::object(), warnings = json::array();
  for (const auto& [name, points] : run.series)
    series[name] = points_of(points);
  for (const auto& [at, text] : run.warnings)
    warnings.push_back({at, text});
  return {{"name", run.name}, {"samples", samples}, {"series", series}, {"warnings", warnings}};
}

double last_place(const Run& run) {
  double last = 0;
  for (const auto& [name, points] : run.series)
    last = std::max(last, points.back().first);
  return last;
}

// The data as JavaScript in a page: nothing in it ends the script.
std::string script_of(const json& data) {
  constexpr int kDense = -1;
  std::string text = data.dump(kDense, ' ', true, json::error_handler_t::replace);
  for (size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at))
    text.replace(at, 1, "\\u003c");
  return text;
}

std::string page_of(std::vector<Run> runs) {
  const bool steps = std::ranges::all_of(runs, [](const Run& run) { return run.series.contains(kSteps); });
  size_t longest = 0;
  json found = json::array();
  for (Run& run : runs) {
    const double samples = last_place(run);
    note_skipped(run);
    if (steps) count_steps(run);
    for (const auto& [name, points] : run.series)
      longest = std::max(longest, points.size());
    found.push_back(run_of(run, samples));
  }
  std::string about = "Numbers of the first rank's engine";
  if (longest > kMostPoints)
    about += ", " + std::to_string((longest + kMostPoints - 1) / kMostPoints) + " or fewer neighbours as their mean";
  const json data{{"runs", found}, {"x", steps ? "step" : "samples"}, {"about", about + "."}};
  constexpr std::string_view kPlace = "@DATA@";
  std::string page = kPageHtml;
  return page.replace(page.find(kPlace), kPlace.size(), script_of(data));
}

void page(const Arguments& given, const FrontEnd&, Result& result) {
  const std::string& out = given.text("--out");
  const std::vector<Run> runs = read_runs(given.all("run"));
  io::replace_text(out, page_of(runs));
  result.output = "written: " + out + "\n";
  for (const Run& run : runs)
    for (const std::string& line : run.left_out)
      result.output += line + "\n";
}

}  // namespace

Command page_command() {
  return {
      {.command = "page",
       .summary = "One page of HTML of how runs went: loss, norm, rate, throughput, memory, phases, warnings.",
       .needed = {{.name = "run",
                   .help = "files of JSON lines (tessera.json_lines), folders of them or of CSV files (csv_monitor)",
                   .several = true}},
       .options = {{"--out", "the file to write", "FILE", false, "tessera.html"}}},
      page};
}

}  // namespace tessera::commands

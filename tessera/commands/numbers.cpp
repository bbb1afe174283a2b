#include "tessera/commands/numbers.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"

namespace tessera::commands {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kEngines = "Train/Samples/";

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  TESSERA_CHECK_IO(file.good(), "page", "cannot read '", path.string(), "'");
  return {std::istreambuf_iterator<char>(file), {}};
}

// `broken`: lines of a file, as a killed program or another writer leaves them.
void note_broken(Run& run, const fs::path& path, const std::vector<size_t>& broken) {
  if (broken.empty()) return;
  run.left_out.push_back(c10::str("left out of '", path.string(), "': line ", broken.front(),
                                  broken.size() > 1 ? c10::str(" and ", broken.size() - 1, " more") : "",
                                  ", no number or warning of a run"));
}

void cut(Run::Points& points, double at) {
  while (!points.empty() && points.back().first >= at)
    points.pop_back();
}

void add_point(Run::Points& points, double at, std::optional<double> value) {
  cut(points, at);
  points.emplace_back(at, value && std::isfinite(*value) ? value : std::nullopt);
}

bool is_engines(const std::string& name) {
  return name.starts_with(kEngines);
}

// Lines of JSON, in the order in which they were written.
class Lines {
 public:
  explicit Lines(Run& run) : run_(run) {}

  void add(const json& line) {
    const double at = line.at("step").get<double>();
    if (line.contains("warning")) {
      run_.warnings.emplace_back(at, line["warning"].get<std::string>());
      return;
    }
    const json& value = line.at("value");
    const std::string name = line.at("name").get<std::string>();
    const std::optional<double> number = value.is_null() ? std::nullopt : std::optional(value.get<double>());
    Run::Points& points = run_.series[name];
    if (is_engines(name)) {
      if (!points.empty() && points.back().first >= at) go_back(at);
      settled_ = run_.warnings.size();
    }
    add_point(points, at, number);
  }

 private:
  // The run went on from before `at`. Warnings since the engine's last number are already those of what it did then.
  void go_back(double at) {
    for (auto& [name, points] : run_.series)
      cut(points, at);
    const auto end = run_.warnings.begin() + static_cast<std::ptrdiff_t>(settled_);
    run_.warnings.erase(
        std::remove_if(run_.warnings.begin(), end, [&](const auto& warning) { return warning.first >= at; }), end);
  }

  Run& run_;
  size_t settled_ = 0;  // warnings before the engine's last number
};

Run of_json_lines(const fs::path& path) {
  Run run{path.stem().string()};
  Lines lines(run);
  const std::string text = contents(path);
  std::vector<size_t> broken;
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const std::string line = text.substr(begin, end - begin);
    begin = end == std::string::npos ? text.size() : end + 1;
    ++number;
    if (line.empty()) continue;
    try {
      lines.add(json::parse(line));
    } catch (const json::exception&) {
      if (end != std::string::npos) broken.push_back(number);  // else a killed run has left it
    }
  }
  std::erase_if(run.series, [](const auto& series) { return series.second.empty(); });
  TESSERA_CHECK_IO(broken.empty() || !run.series.empty(), "page", "'", path.string(), "', line ", broken.front(),
                   ", is no number or warning of a run; give files of JSON lines that an engine has written "
                   "(tessera.json_lines), or folders of CSV files (csv_monitor)");
  note_broken(run, path, broken);
  return run;
}

// Cells of a CSV file, by rows; a cell in quotes may have line ends in it.
std::vector<std::vector<std::string>> cells_of(const std::string& text) {
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> row(1);
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '"' && i + 1 < text.size() && text[i + 1] == '"') {
      row.back() += text[++i];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (!quoted && c == ',') {
      row.emplace_back();
    } else if (!quoted && c == '\n') {
      rows.push_back(std::move(row));
      row.assign(1, "");
    } else if (quoted || c != '\r') {
      row.back() += c;
    }
  }
  return rows;  // a last line without an end is what a killed run has left
}

std::optional<double> number_of(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

// The name of the metric that csv_metrics() made a file name of; "/" of the program's own stay "_".
std::string metric_of(const std::string& stem) {
  std::string engines = kEngines;
  std::ranges::replace(engines, '/', '_');
  return stem.starts_with(engines) ? kEngines + stem.substr(engines.size()) : stem;
}

// Where the engine's numbers went back, what other files have beyond its last number is of what the run lost.
void cut_beyond(Run& run) {
  double last = 0;
  for (const auto& [name, points] : run.series)
    if (is_engines(name) && !points.empty()) last = std::max(last, points.back().first);
  const auto beyond = [&](const auto& point) { return point.first > last; };
  for (auto& [name, points] : run.series)
    std::erase_if(points, beyond);
  std::erase_if(run.warnings, beyond);
}

Run of_csv_files(const fs::path& folder, const std::vector<fs::path>& files) {
  Run run{fs::absolute(folder / ".").parent_path().filename().string()};
  bool went_back = false;
  for (const fs::path& path : files) {
    const auto rows = cells_of(contents(path));
    std::vector<size_t> broken;
    const bool warns = path.stem() == "warnings";
    const std::string name = warns ? "" : metric_of(path.stem().string());
    for (size_t i = 1; i < rows.size(); ++i) {
      const auto at = number_of(rows[i][0]);
      if (!at || rows[i].size() != 2) {
        broken.push_back(i + 1);
      } else if (warns) {
        run.warnings.emplace_back(*at, rows[i][1]);
      } else {
        Run::Points& points = run.series[name];
        went_back = went_back || (is_engines(name) && !points.empty() && points.back().first >= *at);
        add_point(points, *at, number_of(rows[i][1]));
      }
    }
    note_broken(run, path, broken);
  }
  if (went_back) cut_beyond(run);
  std::erase_if(run.series, [](const auto& series) { return series.second.empty(); });
  return run;
}

std::vector<fs::path> files_in(const fs::path& folder, const char* extension) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == extension) found.push_back(entry.path());
  std::ranges::sort(found);
  return found;
}

}  // namespace

std::vector<Run> read_runs(const std::vector<std::string>& paths) {
  std::vector<Run> runs;
  std::vector<std::string> places;
  const auto add = [&](Run run, const fs::path& place) {
    TESSERA_CHECK_IO(!run.series.empty(), "page", "'", place.string(),
                     "' has no numbers of a run: an engine writes them after its first update (tessera.json_lines, "
                     "csv_monitor)");
    runs.push_back(std::move(run));
    places.push_back(place.string());
  };
  for (const fs::path path : paths) {
    TESSERA_CHECK_IO(fs::exists(path), "page", "there is no '", path.string(),
                     "'; give the file of tessera.json_lines, or the folder of csv_monitor");
    if (!fs::is_directory(path)) {
      add(of_json_lines(path), path);
    } else if (const auto tables = files_in(path, ".csv"); !tables.empty()) {
      add(of_csv_files(path, tables), path);
    } else {
      const auto lines = files_in(path, ".jsonl");
      TESSERA_CHECK_IO(!lines.empty(), "page", "there is no file *.csv and none *.jsonl in '", path.string(), "'");
      for (const fs::path& file : lines)
        add(of_json_lines(file), file);
    }
  }
  std::map<std::string, int> names;
  for (const Run& run : runs)
    ++names[run.name];
  for (size_t i = 0; i < runs.size(); ++i)
    if (names[runs[i].name] > 1) runs[i].name = places[i];
  return runs;
}

}  // namespace tessera::commands

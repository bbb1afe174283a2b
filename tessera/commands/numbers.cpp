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

void add_point(Run::Points& points, double at, std::optional<double> value) {
  while (!points.empty() && points.back().first >= at)
    points.pop_back();
  points.emplace_back(at, value && std::isfinite(*value) ? value : std::nullopt);
}

void add_line(Run& run, const json& line) {
  const double at = line.at("step").get<double>();
  if (line.contains("warning")) {
    run.warnings.emplace_back(at, line["warning"].get<std::string>());
    return;
  }
  const json& value = line.at("value");
  add_point(run.series[line.at("name").get<std::string>()], at,
            value.is_null() ? std::nullopt : std::optional(value.get<double>()));
}

Run of_json_lines(const fs::path& path) {
  Run run{path.stem().string()};
  const std::string text = contents(path);
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const std::string line = text.substr(begin, end - begin);
    begin = end == std::string::npos ? text.size() : end + 1;
    ++number;
    if (line.empty()) continue;
    try {
      add_line(run, json::parse(line));
    } catch (const json::exception&) {
      TESSERA_CHECK_IO(end == std::string::npos, "page", "'", path.string(), "', line ", number,
                       ", is no number or warning of a run; give files of JSON lines that an engine has written "
                       "(tessera.json_lines), or folders of CSV files (csv_monitor)");
    }
  }
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

Run of_csv_files(const fs::path& folder, const std::vector<fs::path>& files) {
  Run run{fs::absolute(folder / ".").parent_path().filename().string()};
  for (const fs::path& path : files) {
    const auto rows = cells_of(contents(path));
    for (size_t i = 1; i < rows.size(); ++i) {
      const auto at = number_of(rows[i][0]);
      TESSERA_CHECK_IO(at && rows[i].size() == 2, "page", "'", path.string(), "', row ", i + 1,
                       ", has no step and value");
      if (path.stem() == "warnings")
        run.warnings.emplace_back(*at, rows[i][1]);
      else
        add_point(run.series[metric_of(path.stem().string())], *at, number_of(rows[i][1]));
    }
  }
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

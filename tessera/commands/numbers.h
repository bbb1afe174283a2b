// Runs, from what writers of numbers (io/metrics.h) have left: files of JSON lines, folders of CSV files.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::commands {

struct Run {
  using Points = std::vector<std::pair<double, std::optional<double>>>;  // over samples; none: not a finite number
  std::string name;
  std::map<std::string, Points> series{};  // by the name of a metric
  std::vector<std::pair<double, std::string>> warnings{};
  std::vector<std::string> left_out{};  // lines of the files that cannot be read
};

// Reads a file of JSON lines; a folder of CSV files; a folder with files *.jsonl, a run each. Where a run went on from an earlier
// place, all that it had after that is left out; of CSV files, whose order among each other is not known, that of each file and what
// lies beyond the engine's last number. Names are those of files and folders, whole paths where they would be alike. IoError
// for a path without any number.
std::vector<Run> read_runs(const std::vector<std::string>& paths);

}  // namespace tessera::commands

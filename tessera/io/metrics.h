// Where a program's numbers go while it trains: CSV files, event files of TensorBoard, lines of JSON. One process writes.
//
//   auto writer = tessera::io::csv_metrics("numbers");
//   writer->write({{"Train/loss", 1.25, 640}});
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::io {

// Engines count steps in samples.
struct Metric {
  std::string name;
  double value = 0;
  int64_t step = 0;
};

class MetricWriter {
 public:
  virtual ~MetricWriter() = default;
  // Writes: the numbers are in the file on return. IoError.
  virtual void write(const std::vector<Metric>& metrics) = 0;
  // Writes a warning, and where the run was then. Does nothing where the format has no place for texts.
  virtual void warn(const std::string& text, int64_t step);
};

// Value error for a number without a name, before any is written. Writers below ask it; others are for who calls them to ask.
void check_metrics(const std::vector<Metric>& metrics);

// A warning that a writer has failed so: a run does not end for its numbers.
std::string missing_numbers(const std::string& error);

// ---- writers of files. A leading "~" of a path is the user's folder. Where another writer, of this program or another, has a path,
// csv_metrics() and json_metrics() warn: the numbers of both stand there. A line that a killed program has left half ends there.

// A folder, made where it is missing, with one file for each name, "/" and " " in it as "_": columns step and the last part of the
// name; warnings are in warnings.csv. A run that goes on appends to what is there. write(): a value error for a name that is none
// of a file.
std::unique_ptr<MetricWriter> csv_metrics(const std::string& folder);
// A folder with an event file of this writer's own, which TensorBoard shows as scalars. Values are rounded to fp32, as there.
std::unique_ptr<MetricWriter> tensorboard_metrics(const std::string& folder);
// A file that gets a line for each number: {"name": "Train/loss", "value": 1.25, "step": 640, "time": 1735689600.5}. A value
// that is not finite is null; a warning is {"warning": "...", "step": 640, "time": ...}.
std::unique_ptr<MetricWriter> json_metrics(const std::string& path);

// The folder that DeepSpeed's sections mean: output_path/job_name; without a path, below ~/`standard`.
std::string metrics_folder(const std::string& output_path, const std::string& job_name, const std::string& standard);

// The number as Python writes a float, which reads back to the same: 0.001, 1e-05, 1.0, nan.
std::string shortest(double value);

}  // namespace tessera::io

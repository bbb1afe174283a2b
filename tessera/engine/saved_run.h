// SavedRun: what a manifest says of the run, all of it checked where it is read.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/amp/grad_scaler.h"

namespace tessera::engine {

class Engine;

// An accumulation that had begun: what save_accumulation() returned.
struct SavedRunAccumulation {
  std::string spread;
  double contributions = 1;
  int ranks = 1, replicas = 1;
  bool unreduced = false, flushed = false, scaled = false, replicas_agree = false;
  bool uncounted = true;  // a backward had no step() yet
  double gradient_scale = 1;
};

// The optimizer's type, or a client's class, as optim::family_of() takes it; empty without one.
std::string optimizer_of(Engine& engine);

struct SavedRun {
  int64_t micro_steps = 0, global_steps = 0, skipped_steps = 0, global_samples = 0;
  std::optional<int64_t> begun, accumulation_steps;  // not in older files, nor in those of others
  std::optional<double> norm;                        // norm of the last update; not in older files
  std::optional<amp::GradScaler::State> scaler;      // of a run that scaled its loss
  std::vector<nlohmann::ordered_json> groups;        // fields of each_field()
  std::optional<SavedRunAccumulation> accumulation;
  std::map<std::string, int64_t> unwritten;  // updates since a user wrote to a parameter, by name
  std::string optimizer;                     // optimizer_of(); empty: not in older files, nor in those of others
  std::string ranks;                         // the ranks that saved it, and how they lay
  std::string client;                        // the front end's part, a JSON object

  // `run`: a JSON object, of the manifest `path`. IoError that names file and key.
  SavedRun(const std::string& run, const std::string& path);
  void apply(Engine& engine, int64_t micro_steps_here, int64_t begun_here) const;
};

}  // namespace tessera::engine

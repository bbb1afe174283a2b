// Watch: what an engine says while it trains, for both front ends: numbers for writers (io/metrics.h), and lines for people.
#pragma once

#include <array>
#include <chrono>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/phases.h"
#include "tessera/comm/timed_group.h"
#include "tessera/config/config.h"
#include "tessera/config/estimate.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/flops.h"
#include "tessera/engine/flops_profile.h"
#include "tessera/io/metrics.h"
#include "tessera/io/progress.h"

namespace tessera::engine {

// Bytes that an engine holds on this rank, and what the memory formula (config/estimate.h) says of them, by kind wherever they
// live; `host` and `disk` are parts of the kinds.
struct MemoryUse : Engine::Memory {
  config::Estimate formula;
};
// Prints a table of kinds in MiB.
std::ostream& operator<<(std::ostream& stream, const MemoryUse& memory);
std::string table_of(const Engine::Memory& memory);  // without the formula

// Collectives of one kind and size, as comms_logger notes them.
struct CallRow {
  comm::CallTimes total;
  std::optional<double> straggler_seconds = {};  // how long this rank waited for the last one to come
};

class Watch {
 public:
  // Reads wall_clock_breakdown, comms_logger and fp16. Value error for operations that comms_logger cannot time. Local.
  explicit Watch(const config::Config& config);

  // The record of collectives that a timed mesh makes; null without comms_logger.enabled.
  const std::shared_ptr<comm::CallRecord>& calls() const { return calls_; }

  // Takes the engine, once it is built. `speaks`: this rank shows the progress line of steps_per_print, and the profile. Local.
  void attach(Engine& engine, bool speaks);
  // Somebody takes metrics from here on. Local.
  void listen(Engine& engine);
  // Sets what only the program knows; 0: not known. Steps of the whole run (else the schedule's total_num_steps), tokens of one
  // sample. Value error for a negative number.
  void expect(int64_t steps, double tokens_per_sample = 0);

  struct Report {
    std::vector<io::Metric> metrics;  // over samples, named in docs/training.md; none unless somebody listens
    std::vector<std::string> lines;
    std::string progress = {};               // for line(); empty where none is due
    std::vector<std::string> warnings = {};  // on every rank; the first loss that is not finite
  };
  // After a step: whether stepped() wants rates.
  bool wants_rates(const Engine& engine) const { return listens_ || says_progress(engine); }
  // Local.
  MemoryUse memory(const Engine& engine) const { return {engine.memory(), formula_}; }
  // To be called after every optimizer step, also a skipped one. `rates`: those of the next step. `momenta`: a text for each param
  // group, as momentum_text() makes it; none: those of the engine's groups. No step waits for a device here: what is not known yet
  // is left out. Local.
  Report stepped(Engine& engine, const std::vector<double>& rates,
                 const std::optional<std::vector<std::string>>& momenta = {});
  struct ParamGroup {
    size_t parameters;
    std::string values;  // the hyper-parameters
  };
  // Lines before the first step: how much of the states goes where, if that was to be found; with dump_state the configuration
  // and the param groups. None: those of the engine. Local.
  std::vector<std::string> first_lines(Engine& engine, const std::optional<std::vector<ParamGroup>>& groups = {}) const;
  // The line that progress is shown on.
  io::ProgressLine& line() { return *line_; }
  // From here on Train/Samples/tflops, of each rank, is among the numbers: `per_sample` operations for every sample of an update, by
  // the time from one update to the next. `peak`: what a device can do in a second; with it also Train/Samples/mfu, their quotient.
  // Value error for a number that is not > 0.
  void count_flops(const Engine& engine, double per_sample, std::optional<double> peak = {});
  // The same by three times what FlopCounter counts in the forwards of the next optimizer step, with a warning where that is nothing.
  // Value error for a peak that is not > 0.
  void count_flops_of_step(const Engine& engine, std::optional<double> peak = {});
  // Where the section flops_profiler has the forward that comes, of a module in training, profiled, which is the first one of its step:
  // its recompute_fwd_factor. Once; who asks profiles it.
  std::optional<double> profiles(const Engine& engine, bool training);
  struct Shown {
    std::string text = {};  // for standard output; empty where it belongs into a file, and on other ranks
    std::vector<std::string> warnings = {};  // the file cannot be written
  };
  // After that forward: adds the text to the section's file, if any. Local.
  Shown show_profile(const Engine& engine, const FlopsProfile& profile) const;
  // Around a forward: counts while the object lives, where that is wanted and `trains`.
  class [[nodiscard]] Forward {
   public:
    Forward(Watch& watch, bool trains);
    ~Forward();
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;

   private:
    Watch& watch_;
    std::optional<FlopCounter> counter_;
  };
  // Rows of the collectives so far. Usage error without comms_logger.enabled. Collective with `stragglers`, else local.
  std::vector<CallRow> call_rows(Engine& engine, bool stragglers) const;
  // Seconds of the last optimizer step by phase: gather and reduce lie inside others. Empty without wall_clock_breakdown, and
  // before the first step.
  using Seconds = std::array<double, kPhases.size()>;
  const std::optional<Seconds>& step_seconds() const { return step_seconds_; }

 private:
  Seconds take_times(const Engine& engine);
  void end_count(const Engine& engine, std::vector<std::string>& warnings);
  void add_times(int64_t step, std::vector<io::Metric>& metrics) const;
  void add_numbers(Engine& engine, const std::vector<double>& rates, std::vector<io::Metric>& metrics);
  void add_norm(const Engine& engine, std::vector<io::Metric>& metrics) const;
  void add_memory(const Engine& engine, std::vector<io::Metric>& metrics) const;
  void add_calls(const Engine& engine, std::vector<io::Metric>& metrics);
  void add_speeds(const Engine& engine, const std::pair<double, double>& lap, std::vector<io::Metric>& metrics) const;
  bool says_progress(const Engine& engine) const;
  std::string progress_of(const Engine& engine, const std::vector<double>& rates,
                          const std::vector<std::string>& momenta);
  std::string time_left(int64_t step) const;

  // Samples since the last call of next(), and in how many seconds; none the first time.
  struct Laps {
    std::optional<std::chrono::steady_clock::time_point> at = {};
    int64_t samples = 0;
    std::optional<std::pair<double, double>> next(int64_t samples_now);
  };

  // Collectives of one kind, until the last update.
  struct Calls {
    int64_t bytes = 0;
    double seconds = 0;
  };

  config::Config config_;
  config::Estimate formula_;
  bool times_, scales_, shows_calls_, shows_labels_;
  std::shared_ptr<comm::CallRecord> calls_;
  std::map<std::string, Calls> sent_;
  Seconds total_{}, seconds_{};  // total_ until the last update; seconds_ of it
  std::optional<Seconds> step_seconds_;
  double flops_ = 0;  // of a sample; 0: not counted
  std::optional<double> peak_;
  std::optional<double> counted_;           // operations of forwards, while they are counted
  int64_t counted_from_ = 0;                // micro-steps before
  int64_t every_ = 0, expected_steps_ = 0;  // 0: no progress line; not known
  double tokens_ = 0;                       // of a sample; 0: not known
  bool first_ = false, speaks_ = false, listens_ = false;
  bool profiled_ = false;
  std::optional<double> loss_;  // of the last update
  bool warned_of_loss_ = false;
  Laps updates_, lines_;
  int64_t first_step_ = 0;  // that this run began with
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  std::unique_ptr<io::ProgressLine> line_ = std::make_unique<io::ProgressLine>();
};

// The writers that the sections tensorboard and csv_monitor and the key tessera.json_lines switch on; IoError where their folders
// cannot be made.
std::vector<std::unique_ptr<io::MetricWriter>> metric_writers(const config::Config& config);

// Betas of a param group as "(0.9, 0.999)", else its momentum as "0.9".
std::string momentum_text(const std::vector<double>& values);

std::string text_of(const std::vector<CallRow>& rows);

}  // namespace tessera::engine

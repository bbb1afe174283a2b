// Watch: what an engine says while it trains, for both front ends: numbers for writers (io/metrics.h), and lines for people.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/phases.h"
#include "tessera/comm/timed_group.h"
#include "tessera/config/config.h"
#include "tessera/engine/engine.h"
#include "tessera/io/metrics.h"

namespace tessera::engine {

class Watch {
 public:
  // By the sections wall_clock_breakdown, comms_logger and fp16. Value error for operations that comms_logger cannot time. Local.
  explicit Watch(const config::Config& config);

  // Where collectives are noted that a timed mesh makes; null without comms_logger.enabled.
  const std::shared_ptr<comm::CallRecord>& calls() const { return calls_; }

  struct Report {
    std::vector<io::Metric>
        metrics;  // over samples: Train/Samples/train_loss where losses are kept, lr, loss_scale, times
    std::vector<std::string> lines;
  };
  // After every optimizer step, also a skipped one. `rates`: those of the next step. Local.
  Report stepped(Engine& engine, const std::vector<double>& rates);
  // From here on Train/Samples/tflops, of each rank, is among the numbers: `per_sample` operations for every sample of an update, by
  // the time from one update to the next. `peak`: what a device can do in a second; with it also Train/Samples/mfu, their quotient.
  // Value error for a number that is not > 0.
  void count_flops(const Engine& engine, double per_sample, std::optional<double> peak = {});
  // What the last optimizer step took, by phase: gather and reduce lie inside the others. Empty without wall_clock_breakdown, and
  // before the first step.
  using Seconds = std::array<double, kPhases.size()>;
  const std::optional<Seconds>& step_seconds() const { return step_seconds_; }

 private:
  void take_times(Engine& engine);
  void add_times(int64_t step, std::vector<io::Metric>& metrics) const;
  void add_flops(const Engine& engine, std::vector<io::Metric>& metrics);

  bool times_, scales_, shows_calls_, shows_labels_;
  std::shared_ptr<comm::CallRecord> calls_;
  Seconds total_{};
  std::optional<Seconds> step_seconds_;
  double flops_ = 0;  // of a sample; 0: not counted
  std::optional<double> peak_;
  std::chrono::steady_clock::time_point updated_;  // when, and how many samples there were
  int64_t samples_ = 0;
};

// The writers that the sections tensorboard and csv_monitor switch on; IoError where their folders cannot be made.
std::vector<std::unique_ptr<io::MetricWriter>> metric_writers(const config::Config& config);

// What an engine holds on this rank, by kind, in MiB: "params: 1.0 | grads: ...".
std::string text_of(const Engine::Memory& memory);

// Collectives of one kind and size, as comms_logger notes them.
struct CallRow {
  comm::CallTimes total;
  std::optional<double> straggler_seconds = {};  // of them, what this rank waited for the one that came last
};
// With `stragglers` collective.
std::vector<CallRow> call_rows(const comm::CallRecord& record, Engine& engine, bool stragglers);
std::string text_of(const std::vector<CallRow>& rows);

}  // namespace tessera::engine

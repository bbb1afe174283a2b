#include "tessera/engine/watch.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/mesh.h"

namespace tessera::engine {
namespace {

template <class... A>
std::string formatted(const char* format, A... arguments) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, arguments...);
  return text.data();
}

double of_phase(const Watch::Seconds& seconds, Phase phase) {
  return seconds[static_cast<size_t>(phase)];
}

std::string times_line(const Watch::Seconds& seconds) {
  std::string line = "time (ms)";
  for (const Phase phase : kPhases)
    line += std::string(phase == Phase::Gather ? " | of these " : " | ") + phase_name(phase) +
            formatted(": %.2f", of_phase(seconds, phase) * 1e3);
  return line;
}

std::string call_line(const comm::CallTime& call, bool with_label) {
  return "comm op: " + call.op + formatted(" | time (ms): %.3f", call.seconds * 1e3) +
         " | msg size: " + std::to_string(call.bytes) + " B | ranks: " + std::to_string(call.ranks) +
         (with_label ? " | " + call.label : "");
}

}  // namespace

Watch::Watch(const config::Config& config)
    : times_(config.wall_clock_breakdown),
      scales_(config.fp16.enabled),
      shows_calls_(config.comms_logger.verbose),
      shows_labels_(config.comms_logger.debug) {
  const config::CommsLogger& section = config.comms_logger;
  if (section.enabled)
    calls_ = std::make_shared<comm::CallRecord>(section.prof_all ? std::vector<std::string>() : section.prof_ops);
}

Watch::Report Watch::stepped(Engine& engine, const std::vector<double>& rates) {
  Report report;
  const int64_t step = engine.global_samples();
  if (times_) {
    take_times(engine);
    report.lines.push_back(times_line(*step_seconds_));
  }
  if (const std::optional<double> loss = engine.take_loss())
    report.metrics.push_back({"Train/Samples/train_loss", *loss, step});
  if (!rates.empty()) report.metrics.push_back({"Train/Samples/lr", rates[0], step});
  if (scales_) report.metrics.push_back({"Train/Samples/loss_scale", engine.scaling().scaler().scale(), step});
  if (times_) add_times(step, report.metrics);
  if (flops_ > 0) add_flops(engine, report.metrics);
  if (calls_ != nullptr && shows_calls_)
    for (const comm::CallTime& call : calls_->take_calls())
      report.lines.push_back(call_line(call, shows_labels_));
  return report;
}

void Watch::count_flops(const Engine& engine, double per_sample, std::optional<double> peak) {
  TESSERA_CHECK_VALUE(std::isfinite(per_sample) && per_sample > 0 && peak.value_or(1) > 0, "engine.count_flops",
                      "operations of a sample and of a device's second must be > 0, got ", per_sample, " and ",
                      peak.value_or(1));
  flops_ = per_sample;
  peak_ = peak;
  updated_ = std::chrono::steady_clock::now();
  samples_ = engine.global_samples();
}

void Watch::add_flops(const Engine& engine, std::vector<io::Metric>& metrics) {
  const auto now = std::chrono::steady_clock::now();
  const double seconds = std::chrono::duration<double>(now - std::exchange(updated_, now)).count();
  const int64_t samples = engine.global_samples();
  const auto done = static_cast<double>(samples - std::exchange(samples_, samples));
  if (!(seconds > 0)) return;
  const double rate = flops_ * done / seconds / engine.mesh().size(comm::kAxes);
  metrics.push_back({"Train/Samples/tflops", rate * 1e-12, samples});
  if (peak_) metrics.push_back({"Train/Samples/mfu", rate / *peak_, samples});
}

void Watch::take_times(Engine& engine) {
  step_seconds_.emplace();
  for (const Phase phase : kPhases) {
    const auto i = static_cast<size_t>(phase);
    const double total = std::chrono::duration<double>(engine.phases().total(phase).time).count();
    (*step_seconds_)[i] = total - std::exchange(total_[i], total);
  }
}

void Watch::add_times(int64_t step, std::vector<io::Metric>& metrics) const {
  const auto add = [&](const char* name, double seconds) {
    metrics.push_back({std::string("Train/Samples/elapsed_time_ms_") + name, seconds * 1e3, step});
  };
  const double backward = of_phase(*step_seconds_, Phase::Backward), reduce = of_phase(*step_seconds_, Phase::Reduce);
  add("forward", of_phase(*step_seconds_, Phase::Forward));
  add("backward", backward);
  add("backward_inner", std::max(0.0, backward - reduce));
  add("backward_allreduce", reduce);
  add("step", of_phase(*step_seconds_, Phase::Step));
}

std::vector<std::unique_ptr<io::MetricWriter>> metric_writers(const config::Config& config) {
  std::vector<std::unique_ptr<io::MetricWriter>> writers;
  const auto folder = [](const config::FileMonitor& section, const char* standard) {
    return io::metrics_folder(section.output_path, section.job_name, standard);
  };
  if (config.tensorboard.enabled) writers.push_back(io::tensorboard_metrics(folder(config.tensorboard, "tensorboard")));
  if (config.csv_monitor.enabled) writers.push_back(io::csv_metrics(folder(config.csv_monitor, "csv_monitor")));
  return writers;
}

std::string text_of(const Engine::Memory& memory) {
  std::string text;
  const auto add = [&](const char* kind, int64_t bytes) {
    text +=
        (text.empty() ? "" : " | ") + std::string(kind) + formatted(": %.1f", static_cast<double>(bytes) / (1 << 20));
  };
  add("params", memory.params);
  add("grads", memory.grads);
  add("master", memory.master);
  add("states", memory.states);
  add("buckets", memory.buckets);
  add("peak_buckets", memory.peak_buckets);
  add("shared", memory.shared);
  return text;
}

std::vector<CallRow> call_rows(const comm::CallRecord& record, Engine& engine, bool stragglers) {
  std::vector<CallRow> rows;
  for (const comm::CallTimes& total : record.totals()) {
    rows.push_back({total});
    // The rank that came last waited least.
    if (stragglers) rows.back().straggler_seconds = total.seconds + engine.states().agree_max(-total.seconds);
  }
  return rows;
}

std::string text_of(const std::vector<CallRow>& rows) {
  if (rows.empty()) return "(none)";
  std::vector<std::vector<std::string>> lines{
      {"op", "bytes", "ranks", "calls", "total_ms", "average_ms", "algbw_gbps", "busbw_gbps"}};
  const bool stragglers = rows[0].straggler_seconds.has_value();
  if (stragglers) lines[0].emplace_back("straggler_ms");
  for (const auto& [total, waited] : rows) {
    const double ms = total.seconds * 1e3;
    lines.push_back({total.op, std::to_string(total.bytes), std::to_string(total.ranks), std::to_string(total.calls),
                     formatted("%.3f", ms), formatted("%.3f", ms / static_cast<double>(total.calls)),
                     formatted("%.3f", total.algorithm_bandwidth() * 8e-9),
                     formatted("%.3f", total.bus_bandwidth() * 8e-9)});
    if (stragglers) lines.back().push_back(formatted("%.3f", waited.value_or(0) * 1e3));
  }
  std::vector<size_t> widths(lines[0].size());
  for (const auto& line : lines)
    for (size_t i = 0; i < line.size(); ++i)
      widths[i] = std::max(widths[i], line[i].size());
  std::string text;
  for (const auto& line : lines) {
    text += text.empty() ? "" : "\n";
    for (size_t i = 0; i < line.size(); ++i)
      text += (i > 0 ? "  " : "") + std::string(widths[i] - line[i].size(), ' ') + line[i];
  }
  return text;
}

}  // namespace tessera::engine

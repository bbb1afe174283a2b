#include "tessera/engine/watch.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>
#include <variant>

#include "tessera/base/error.h"
#include "tessera/comm/mesh.h"
#include "tessera/config/resolve.h"

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

using Kinds = std::vector<std::pair<const char*, int64_t>>;
Kinds kinds_of(const Engine::Memory& memory) {
  return {{"params", memory.params}, {"grads", memory.grads},     {"master", memory.master},
          {"states", memory.states}, {"buckets", memory.buckets}, {"peak_buckets", memory.peak_buckets},
          {"shared", memory.shared}, {"host", memory.host},       {"disk", memory.disk}};
}

// What a schedule is for; 0: not known.
int64_t total_steps_of(const config::Config& config) {
  const auto schedule = config::native_schedule(config);
  if (!schedule) return 0;
  return std::visit(
      [](const auto& options) -> int64_t {
        if constexpr (requires { options.total_num_steps; })
          return options.total_num_steps;
        else
          return 0;
      },
      *schedule);
}

}  // namespace

Watch::Watch(const config::Config& config)
    : times_(config.wall_clock_breakdown),
      scales_(config.fp16.enabled),
      shows_calls_(config.comms_logger.verbose),
      shows_labels_(config.comms_logger.debug) {
  every_ = config.steps_per_print.value_or(0);
  expected_steps_ = total_steps_of(config);
  const config::CommsLogger& section = config.comms_logger;
  if (section.enabled)
    calls_ = std::make_shared<comm::CallRecord>(section.prof_all ? std::vector<std::string>() : section.prof_ops);
}

void Watch::attach(Engine& engine, bool speaks) {
  speaks_ = speaks && every_ > 0;
  if (speaks_) engine.keep_losses();
  first_step_ = engine.global_steps();
}

void Watch::listen(Engine& engine) {
  listens_ = true;
  engine.keep_losses();
}

void Watch::expect(int64_t steps, double tokens_per_sample) {
  TESSERA_CHECK_VALUE(steps >= 0 && std::isfinite(tokens_per_sample) && tokens_per_sample >= 0, "engine.expect",
                      "numbers of steps and of a sample's tokens must be >= 0, got ", steps, " and ",
                      tokens_per_sample);
  if (steps > 0) expected_steps_ = steps;
  tokens_ = tokens_per_sample;
}

std::optional<std::pair<double, double>> Watch::Laps::next(int64_t samples_now) {
  const auto now = std::chrono::steady_clock::now();
  const auto before = std::exchange(at, now);
  const auto done = static_cast<double>(samples_now - std::exchange(samples, samples_now));
  if (!before) return {};
  const double seconds = std::chrono::duration<double>(now - *before).count();
  if (!(seconds > 0) || done < 0) return {};
  return std::pair(done, seconds);
}

Watch::Report Watch::stepped(Engine& engine, const std::vector<double>& rates, const std::string& more) {
  Report report;
  if (times_) {
    take_times(engine);
    report.lines.push_back(times_line(*step_seconds_));
  }
  loss_ = engine.take_loss();
  if (listens_) add_numbers(engine, rates, report.metrics);
  if (says_progress(engine)) report.progress = progress_of(engine, rates, more);
  if (!lines_.at) lines_.next(engine.global_samples());
  if (calls_ != nullptr && shows_calls_)
    for (const comm::CallTime& call : calls_->take_calls())
      report.lines.push_back(call_line(call, shows_labels_));
  return report;
}

void Watch::add_numbers(Engine& engine, const std::vector<double>& rates, std::vector<io::Metric>& metrics) {
  const int64_t samples = engine.global_samples();
  const auto add = [&](const std::string& name, double value) {
    metrics.push_back({"Train/Samples/" + name, value, samples});
  };
  if (loss_) add("train_loss", *loss_);
  if (!rates.empty()) add("lr", rates[0]);
  if (scales_) add("loss_scale", engine.scaling().scaler().scale());
  if (times_) add_times(samples, metrics);
  add_norm(engine, metrics);
  add("skipped_steps", static_cast<double>(engine.skipped_steps()));
  add_speeds(engine, metrics);
  for (const auto& [kind, bytes] : kinds_of(engine.memory()))
    if (bytes > 0) add(std::string("memory_bytes_") + kind, static_cast<double>(bytes));
}

// Where an update has not waited for its norm, asking would.
void Watch::add_norm(const Engine& engine, std::vector<io::Metric>& metrics) const {
  const bool waits = engine.options().zero.update_in_backward && !engine.params().empty() &&
                     !engine.params().front().tensor.device().is_cpu();
  if (waits || !engine.was_step_applied()) return;
  if (const std::optional<double> norm = engine.global_grad_norm())
    metrics.push_back({"Train/Samples/grad_norm", *norm, engine.global_samples()});
}

bool Watch::says_progress(const Engine& engine) const {
  return speaks_ && line_->wants(engine.global_steps() % every_ == 0);
}

std::string Watch::progress_of(const Engine& engine, const std::vector<double>& rates, const std::string& more) {
  const int64_t step = engine.global_steps(), total = expected_steps_;
  std::string text = "step=" + std::to_string(step);
  if (total > 0) text += "/" + std::to_string(total);
  if (total > 0 && line_->in_place()) {
    const auto filled = static_cast<size_t>(std::clamp<int64_t>(10 * step / total, 0, 10));
    text += " [" + std::string(filled, '#') + std::string(10 - filled, '.') + "]";
  }
  text += ", skipped=" + std::to_string(engine.skipped_steps()) + ", lr=[";
  for (size_t i = 0; i < rates.size(); ++i)
    text += (i > 0 ? ", " : "") + io::shortest(rates[i]);
  text += "]" + (more.empty() ? "" : ", " + more);
  if (loss_) text += formatted(", loss=%.5g", *loss_);
  if (const auto lap = lines_.next(engine.global_samples())) {
    const double speed = lap->first / lap->second;
    text += formatted(", samples/s=%.4g", speed);
    if (tokens_ > 0) text += formatted(", tokens/s=%.4g", speed * tokens_);
  }
  const Engine::Memory memory = engine.memory();
  const int64_t bytes = memory.params + memory.grads + memory.master + memory.states + memory.buckets;
  return text + formatted(", memory=%.1f MB", static_cast<double>(bytes) / (1 << 20)) + time_left(step);
}

std::string Watch::time_left(int64_t step) const {
  if (expected_steps_ <= step || step <= first_step_) return "";
  const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
  const double a_step = passed / static_cast<double>(step - first_step_);
  const auto left = static_cast<long>(a_step * static_cast<double>(expected_steps_ - step));
  return formatted(", left=%ld:%02ld:%02ld", left / 3600, left / 60 % 60, left % 60);
}

void Watch::count_flops(const Engine& engine, double per_sample, std::optional<double> peak) {
  TESSERA_CHECK_VALUE(std::isfinite(per_sample) && per_sample > 0 && peak.value_or(1) > 0, "engine.count_flops",
                      "operations of a sample and of a device's second must be > 0, got ", per_sample, " and ",
                      peak.value_or(1));
  flops_ = per_sample;
  peak_ = peak;
  updates_.next(engine.global_samples());
}

// By the time since the update before.
void Watch::add_speeds(const Engine& engine, std::vector<io::Metric>& metrics) {
  const int64_t samples = engine.global_samples();
  const auto lap = updates_.next(samples);
  if (!lap) return;
  const double speed = lap->first / lap->second;
  const auto add = [&](const char* name, double value) {
    metrics.push_back({std::string("Train/Samples/") + name, value, samples});
  };
  add("samples_per_second", speed);
  if (tokens_ > 0) add("tokens_per_second", speed * tokens_);
  if (flops_ <= 0) return;
  const double rate = flops_ * speed / engine.mesh().size(comm::kAxes);
  add("tflops", rate * 1e-12);
  if (peak_) add("mfu", rate / *peak_);
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
  for (const auto& [kind, bytes] : kinds_of(memory)) {
    const std::string name = kind;
    if (name == "host" || name == "disk") continue;  // of the others
    text += (text.empty() ? "" : " | ") + name + formatted(": %.1f", static_cast<double>(bytes) / (1 << 20));
  }
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

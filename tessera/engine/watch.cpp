#include "tessera/engine/watch.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <ostream>
#include <utility>
#include <variant>

#include "tessera/base/error.h"
#include "tessera/comm/mesh.h"
#include "tessera/config/resolve.h"

namespace tessera::engine {
namespace {

template <class... A>
std::string formatted(const char* format, A... arguments) {
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), format, arguments...);
  return text.data();
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts)
    all += (all.empty() ? "" : ", ") + text;
  return all;
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

// The formula's bytes by kind wherever they live, and what of them does not live on the device.
config::Estimate formula_of(const Engine& engine, config::Config config) {
  std::vector<config::SizedParam> params;
  for (const ParamSpec& param : engine.params())
    params.push_back({param.name, param.unit, param.tensor.numel(), param.group >= 0});
  const config::ModelSizes sizes = config::sizes_of(params);
  comm::MeshShape mesh;
  for (const comm::Axis axis : comm::kAxes)
    mesh.sizes[static_cast<size_t>(axis)] = engine.mesh().size(axis);
  const config::Estimate placed = config::estimate(sizes, config, mesh);
  config.zero_optimization.offload_optimizer.device = config::OffloadDevice::None;
  config.zero_optimization.offload_param.device = config::OffloadDevice::None;
  config::Estimate formula = config::estimate(sizes, config, mesh);
  formula.host = placed.host;
  formula.disk = placed.disk;
  return formula;
}

// Bytes by operation, of all groups of a mesh.
std::map<std::string, int64_t> bytes_of(const comm::Mesh& mesh) {
  comm::MeshShape shape;
  for (const comm::Axis axis : comm::kAxes)
    shape.sizes[static_cast<size_t>(axis)] = mesh.size(axis);
  std::map<std::string, int64_t> bytes;
  for (const comm::Axes axes : shape.groups()) {
    const comm::CommStats stats = mesh.group(axes)->stats();
    bytes["all_gather"] += stats.all_gather.bytes;
    bytes["reduce_scatter"] += stats.reduce_scatter.bytes;
    bytes["all_reduce"] += stats.all_reduce.bytes;
    bytes["broadcast"] += stats.broadcast.bytes;
    bytes["all_to_all"] += stats.all_to_all.bytes;
  }
  return bytes;
}

// How many steps a schedule is for; 0: not known.
int64_t total_steps_of(const config::Config& config) {
  const auto schedule = config::native_schedule(config);
  if (!schedule) return 0;
  return std::visit(
      [](const auto& options) -> int64_t {
        if constexpr (requires { options.total_num_steps; })
          return options.total_num_steps;
        else if constexpr (requires { options.steps(); })
          return options.steps();
        else
          return 0;
      },
      *schedule);
}

// The row of the optimizer; null where no table has it.
const optim::Type* type_of(const Engine& engine) {
  const Options& options = engine.options();
  return options.rule == optim::Rule::External ? options.client_type : &optim::type_of(options.rule);
}

std::vector<Watch::ParamGroup> groups_of(Engine& engine) {
  const optim::Type* const type = type_of(engine);
  std::vector<Watch::ParamGroup> groups;
  for (const optim::GroupOptions& group : engine.groups()) {
    const auto in_group = [&](const ParamSpec& spec) { return spec.group == static_cast<int>(groups.size()); };
    const auto parameters = static_cast<size_t>(std::ranges::count_if(engine.params(), in_group));
    groups.push_back({parameters, type != nullptr ? optim::text_of(*type, group) : c10::str("lr ", group.lr)});
  }
  return groups;
}

std::vector<std::string> momenta_of(Engine& engine) {
  const optim::Type* const type = type_of(engine);
  const auto has = [&](const std::string& name) {
    return type != nullptr && std::ranges::any_of(type->fields, [&](const auto& field) { return field.name == name; });
  };
  std::vector<std::string> momenta;
  for (const optim::GroupOptions& group : engine.groups())
    momenta.push_back(has("betas") ? momentum_text({group.beta1, group.beta2})
                                   : momentum_text({has("momentum") ? group.momentum : 0.0}));
  return momenta;
}

// What the engine holds on this rank, by kind, and what torch has taken of its GPU.
std::string memory_line(const Engine& engine) {
  const auto mib = [](int64_t bytes) { return formatted("%.1f", static_cast<double>(bytes) / (1 << 20)); };
  std::string line = "memory (MB)";
  for (const auto& [kind, bytes] : kinds_of(engine.memory())) {
    const std::string name = kind;
    if (name != "host" && name != "disk") line += " | " + name + ": " + mib(bytes);  // these are of the others
  }
  const auto on_gpu = std::ranges::find_if(engine.params(), [](const auto& spec) { return spec.tensor.is_cuda(); });
  if (on_gpu == engine.params().end()) return line;
  const c10::Device device = on_gpu->tensor.device();
  const auto bytes = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).allocated_bytes[0];
  return line + " | device: " + mib(bytes.current) + " (peak " + mib(bytes.peak) + ")";
}

// `formula`: null without that column.
std::string memory_table(const Engine::Memory& memory, const config::Estimate* formula) {
  struct Row {
    const char* kind;
    int64_t held;
    int64_t config::Estimate::* expected;  // null: the formula says nothing of it
  };
  const std::array<Row, 8> rows{
      {{"params", memory.params, &config::Estimate::params},
       {formula == nullptr ? "grads" : "grads (formula: after a backward)", memory.grads, &config::Estimate::grads},
       {"masters and states", memory.master + memory.states, &config::Estimate::states},
       {formula == nullptr ? "buckets" : "buckets (formula: gathered units)", memory.buckets,
        &config::Estimate::gathered},
       {"buckets at their most", memory.peak_buckets, nullptr},
       {"of these in host memory", memory.host, &config::Estimate::host},
       {"of these on disk", memory.disk, &config::Estimate::disk},
       {"params that ranks share", memory.shared, nullptr}}};
  const auto line = [&](const char* kind, const std::string& held, const std::string& expected) {
    return formatted("%-34s%12s", kind, held.c_str()) +
           (formula == nullptr ? "" : formatted("%12s", expected.c_str())) + "\n";
  };
  const auto mib = [](int64_t bytes) { return formatted("%.2f", static_cast<double>(bytes) / (1 << 20)); };
  std::string text = line("memory of this rank (MiB)", "held", "formula");
  for (const Row& row : rows) {
    const bool says = formula != nullptr && row.expected != nullptr;
    const int64_t expected = says ? formula->*row.expected : 0;
    if (row.held > 0 || expected > 0) text += line(row.kind, mib(row.held), says ? mib(expected) : "");
  }
  return text;
}

}  // namespace

Watch::Watch(const config::Config& config)
    : config_(config),
      times_(config.wall_clock_breakdown),
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
  first_ = speaks;
  speaks_ = speaks && every_ > 0;
  if (speaks_) engine.keep_losses();
  first_step_ = engine.global_steps();
  formula_ = formula_of(engine, config_);
}

std::vector<std::string> Watch::first_lines(Engine& engine,
                                            const std::optional<std::vector<ParamGroup>>& groups) const {
  std::vector<std::string> lines;
  // "auto" is no number.
  if (!config_.tessera.device_share || !config_.zero_optimization.offload_optimizer.ratio)
    lines.push_back(engine.offload_plan().text());
  if (!config_.dump_state) return lines;
  lines.push_back("configuration\n" + config_.describe());
  const std::vector<ParamGroup> shown = groups ? *groups : groups_of(engine);
  for (size_t i = 0; i < shown.size(); ++i)
    lines.push_back(c10::str("param group ", i, ": ", shown[i].parameters, " parameters, ", shown[i].values));
  return lines;
}

void Watch::listen(Engine& engine) {
  if (!listens_ && !times_) take_times(engine);
  std::vector<io::Metric> before;
  if (!listens_) add_calls(engine, before);
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

Watch::Report Watch::stepped(Engine& engine, const std::vector<double>& rates,
                             const std::optional<std::vector<std::string>>& momenta) {
  Report report;
  if (times_ || listens_) seconds_ = take_times(engine);
  if (times_) {
    step_seconds_ = seconds_;
    report.lines.push_back(times_line(seconds_));
  }
  if (counted_) end_count(engine, report.warnings);
  loss_ = engine.take_loss();
  if (loss_ && !std::isfinite(*loss_) && !std::exchange(warned_of_loss_, true))
    report.warnings.push_back(c10::str(
        "[engine.step] the loss of step ", engine.global_steps(), " is ", io::shortest(*loss_),
        ": gradients of it are worth nothing. Look at the inputs, at the rate and at operations like log and division; "
        "torch.autograd's anomaly mode names the one that gave it first"));
  if (listens_) add_numbers(engine, rates, report.metrics);
  // Without rates where its time has come since wants_rates(): the next step's, then.
  if (says_progress(engine) && (!rates.empty() || engine.groups().empty()))
    report.progress = progress_of(engine, rates, momenta ? *momenta : momenta_of(engine));
  if (!lines_.at) lines_.next(engine.global_samples());
  if (calls_ != nullptr && shows_calls_)
    for (const comm::CallTime& call : calls_->take_calls())
      report.lines.push_back(call_line(call, shows_labels_));
  if (config_.memory_breakdown && engine.global_steps() % std::max<int64_t>(1, every_) == 0)
    report.lines.push_back(memory_line(engine));
  return report;
}

void Watch::add_numbers(Engine& engine, const std::vector<double>& rates, std::vector<io::Metric>& metrics) {
  const int64_t samples = engine.global_samples();
  const auto add = [&](const std::string& name, double value) {
    metrics.push_back({"Train/Samples/" + name, value, samples});
  };
  add("global_steps", static_cast<double>(engine.global_steps()));
  if (loss_) add("train_loss", *loss_);
  if (!rates.empty()) add("lr", rates[0]);
  if (scales_) add("loss_scale", engine.scaling().scaler().scale());
  if (times_) add_times(samples, metrics);
  add_norm(engine, metrics);
  add("skipped_steps", static_cast<double>(engine.skipped_steps()));
  for (const Phase phase : kPhases)
    add(std::string("phase_ms_") + phase_name(phase), of_phase(seconds_, phase) * 1e3);
  if (const auto lap = updates_.next(samples)) add_speeds(engine, *lap, metrics);
  add_memory(engine, metrics);
  add_calls(engine, metrics);
}

void Watch::add_memory(const Engine& engine, std::vector<io::Metric>& metrics) const {
  const auto add = [&](const std::string& name, int64_t bytes) {
    if (bytes > 0)
      metrics.push_back({"Train/Samples/memory_" + name, static_cast<double>(bytes), engine.global_samples()});
  };
  for (const auto& [kind, bytes] : kinds_of(engine.memory()))
    add(std::string("bytes_") + kind, bytes);
  add("formula_params", formula_.params);
  add("formula_grads", formula_.grads);
  add("formula_states", formula_.states);
  add("formula_gathered", formula_.gathered);
  add("formula_host", formula_.host);
  add("formula_disk", formula_.disk);
}

// Adds bytes and times since the update before. Times are known for calls that comms_logger notes.
void Watch::add_calls(const Engine& engine, std::vector<io::Metric>& metrics) {
  std::map<std::string, Calls> now;
  for (const auto& [op, bytes] : bytes_of(engine.mesh()))
    now[op].bytes = bytes;
  if (calls_ != nullptr)
    for (const comm::CallTimes& total : calls_->totals())
      now[total.op].seconds += total.seconds;
  for (const auto& [op, calls] : now) {
    Calls& before = sent_[op];
    const auto add = [&](const std::string& name, double value) {
      metrics.push_back({"Train/Samples/" + name + op, value, engine.global_samples()});
    };
    // A record that was reset begins anew.
    const double seconds = calls.seconds - (calls.seconds < before.seconds ? 0 : before.seconds);
    if (calls.bytes > 0) add("comm_bytes_", static_cast<double>(std::max<int64_t>(0, calls.bytes - before.bytes)));
    if (calls.seconds > 0) add("comm_ms_", seconds * 1e3);
    before = calls;
  }
}

// Adds the norm, unless asking would wait where the update has not waited for it.
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

// A line of a terminal is cut at its width: what changes from step to step comes first there.
std::string Watch::progress_of(const Engine& engine, const std::vector<double>& rates,
                               const std::vector<std::string>& momenta) {
  const int64_t step = engine.global_steps(), total = expected_steps_, skipped = engine.skipped_steps();
  std::string text = "step=" + std::to_string(step);
  if (total > 0) text += "/" + std::to_string(total);
  std::string speeds;
  if (loss_) speeds = ", loss=" + (std::isfinite(*loss_) ? formatted("%.5g", *loss_) : io::shortest(*loss_));
  if (const auto lap = lines_.next(engine.global_samples())) {
    const double speed = lap->first / lap->second;
    speeds += formatted(", samples/s=%.4g", speed);
    if (tokens_ > 0) speeds += formatted(", tokens/s=%.4g", speed * tokens_);
  }
  std::vector<std::string> texts;
  for (const double rate : rates)
    texts.push_back(io::shortest(rate));
  const std::string lr = ", lr=[" + joined(texts) + "]";
  const std::string mom = rates.empty() ? "" : ", mom=[" + joined(momenta) + "]";
  const Engine::Memory memory = engine.memory();
  const int64_t bytes = memory.params + memory.grads + memory.master + memory.states + memory.buckets;
  const std::string held = formatted(", memory=%.1f MB", static_cast<double>(bytes) / (1 << 20));
  const std::string skips = ", skipped=" + std::to_string(skipped);
  if (!line_->in_place()) return text + skips + lr + mom + speeds + held + time_left(step);
  if (total > 0) {
    const auto filled = static_cast<size_t>(std::clamp<int64_t>(10 * step / total, 0, 10));
    text += " [" + std::string(filled, '#') + std::string(10 - filled, '.') + "]";
  }
  return text + speeds + time_left(step) + (skipped > 0 ? skips : "") + lr + held;
}

std::string Watch::time_left(int64_t step) const {
  if (expected_steps_ <= step || step <= first_step_) return "";
  const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
  const double a_step = passed / static_cast<double>(step - first_step_);
  const auto left = static_cast<long>(a_step * static_cast<double>(expected_steps_ - step));
  return formatted(", left=%ld:%02ld:%02ld", left / 3600, left / 60 % 60, left % 60);
}

void Watch::count_flops_of_step(const Engine& engine, std::optional<double> peak) {
  TESSERA_CHECK_VALUE(peak.value_or(1) > 0 && std::isfinite(peak.value_or(1)), "engine.count_flops",
                      "peak, operations of a device's second, must be > 0, got ", peak.value_or(1));
  peak_ = peak;
  counted_ = 0;
  counted_from_ = engine.micro_steps();
}

std::optional<double> Watch::profiles(const Engine& engine, bool training) {
  const config::FlopsProfiler& section = config_.flops_profiler;
  if (!section.enabled || profiled_ || !training || engine.global_steps() < section.profile_step) return {};
  profiled_ = true;
  return section.recompute_fwd_factor;
}

Watch::Shown Watch::show_profile(const Engine& engine, const FlopsProfile& profile) const {
  if (!first_) return {};
  const config::FlopsProfiler& section = config_.flops_profiler;
  const ProfileText options{engine.global_steps(), section.module_depth, section.top_modules, section.detailed};
  const std::string text = profile.text(options) + "\n";
  if (!section.output_file) return {text};
  errno = 0;
  std::ofstream file(*section.output_file, std::ios::app);
  if (file << text << std::flush) return {};
  return {text,
          {c10::str("[flops_profiler] cannot write flops_profiler.output_file '", *section.output_file,
                    "': ", std::strerror(errno), "; the profile is on standard output")}};
}

Watch::Forward::Forward(Watch& watch, bool trains) : watch_(watch) {
  if (watch.counted_ && trains) counter_.emplace();
}

Watch::Forward::~Forward() {
  if (counter_ && watch_.counted_) *watch_.counted_ += counter_->total();
}

// A backward has twice the operations of a forward.
void Watch::end_count(const Engine& engine, std::vector<std::string>& warnings) {
  const double operations = *std::exchange(counted_, std::nullopt);
  const int64_t samples = (engine.micro_steps() - counted_from_) * engine.options().micro_batch_size;
  if (operations > 0 && samples > 0)
    count_flops(engine, 3 * operations / static_cast<double>(samples), peak_);
  else
    warnings.emplace_back(
        "[engine.count_flops] no products of matrices, convolutions or attentions were counted in the forwards of this "
        "engine: give per_sample");
}

void Watch::count_flops(const Engine& engine, double per_sample, std::optional<double> peak) {
  TESSERA_CHECK_VALUE(std::isfinite(per_sample) && per_sample > 0 && peak.value_or(1) > 0, "engine.count_flops",
                      "operations of a sample and of a device's second must be > 0, got ", per_sample, " and ",
                      peak.value_or(1));
  flops_ = per_sample;
  peak_ = peak;
  updates_.next(engine.global_samples());
}

// Adds speeds, by the time since the update before.
void Watch::add_speeds(const Engine& engine, const std::pair<double, double>& lap,
                       std::vector<io::Metric>& metrics) const {
  const double speed = lap.first / lap.second;
  const auto add = [&](const char* name, double value) {
    metrics.push_back({std::string("Train/Samples/") + name, value, engine.global_samples()});
  };
  double other = lap.second;
  for (const Phase phase : {Phase::Forward, Phase::Backward, Phase::Step})
    other -= of_phase(seconds_, phase);
  add("phase_ms_other", std::max(0.0, other) * 1e3);
  add("samples_per_second", speed);
  if (tokens_ > 0) add("tokens_per_second", speed * tokens_);
  if (flops_ <= 0) return;
  const double rate = flops_ * speed / engine.mesh().size(comm::kAxes);
  add("tflops", rate * 1e-12);
  if (peak_) add("mfu", rate / *peak_);
}

Watch::Seconds Watch::take_times(const Engine& engine) {
  Seconds seconds{};
  for (const Phase phase : kPhases) {
    const auto i = static_cast<size_t>(phase);
    const double total = std::chrono::duration<double>(engine.phases().total(phase).time).count();
    seconds[i] = total - std::exchange(total_[i], total);
  }
  return seconds;
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
  if (config.tessera.json_lines) writers.push_back(io::json_metrics(*config.tessera.json_lines));
  return writers;
}

std::string momentum_text(const std::vector<double>& values) {
  std::vector<std::string> texts;
  for (const double value : values)
    texts.push_back(io::shortest(value));
  return values.size() == 1 ? texts[0] : "(" + joined(texts) + ")";
}

std::ostream& operator<<(std::ostream& stream, const MemoryUse& memory) {
  return stream << memory_table(memory, &memory.formula);
}

std::string table_of(const Engine::Memory& memory) {
  return memory_table(memory, nullptr);
}

std::vector<CallRow> Watch::call_rows(Engine& engine, bool stragglers) const {
  if (stragglers) engine.check_one_thread("comm_summary");
  TESSERA_CHECK(calls_ != nullptr, "engine.comm_summary",
                "collectives are not timed: set comms_logger.enabled to true");
  std::vector<CallRow> rows;
  for (const comm::CallTimes& total : calls_->totals()) {
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

// What a Session warns of and writes down while it trains.
#include <algorithm>
#include <cstdio>

#include "tessera/base/error.h"
#include "tessera/engine/notices.h"
#include "tessera/nn/session.h"

namespace tessera::nn {

void Session::warn(const std::vector<std::string>& warnings) {
  for (const std::string& line : logs_ ? warnings : std::vector<std::string>())
    TORCH_WARN(line);
  note(warnings);
}

void Session::note(const std::vector<std::string>& warnings) {
  for (const std::string& line : logs_ ? warnings : std::vector<std::string>()) {
    const int64_t samples = core_ == nullptr ? 0 : core_->global_samples();
    warnings_.emplace_back(line, samples);
    for (const auto& writer : writers_)
      give(*writer, [&] { writer->warn(line, samples); });
  }
}

template <class F>
void Session::give(io::MetricWriter& writer, const F& f) {
  try {
    f();
    failing_.erase(&writer);
  } catch (const IoError& error) {
    if (failing_.insert(&writer).second) warn({io::missing_numbers(error.what_without_backtrace())});
  }
}

void Session::warn_of_region() {
  warn({engine::kWithoutAutocast});
}

bool Session::is_cut() const {
  const auto cut = [](const engine::ParamSpec& spec) { return spec.varies.has(comm::Axis::Tp); };
  return std::ranges::any_of(live().params(), cut);
}

void Session::warn_of_cuts() {
  const int ranks = live().mesh().size(comm::Axis::Tp);
  if (ranks == 1 || is_cut()) return;
  warn({c10::str(
      "[initialize] the mesh has ", ranks,
      " ranks along 'tp' (tensor_parallel.autotp_size), and no module of the model is cut over them: all train "
      "the same whole model; build it of the layers in tessera/parallel.h, or leave the ranks to data "
      "parallelism")});
}

void Session::warn_of_frozen() {
  const std::string warning = evaluates_ ? "" : engine::nothing_trained(live().params());
  if (!warning.empty()) warn({warning});
}

void Session::warn_of_step() {
  warn(live().take_notices());
  if (checks_sequence_ == SequenceCheck::Off || !live().was_step_applied()) return;
  const std::string fault = engine::sequence_fault(live().mesh());
  // An update in the backward came before the fault could be seen: the next update is refused.
  if (checks_sequence_ == SequenceCheck::Error && !fault.empty()) return;
  if (live().mesh().rank(comm::Axis::Sp) == 0 && !fault.empty()) warn({"[engine.step] " + fault});
  checks_sequence_ = SequenceCheck::Off;
}

void Session::on_metric(OnMetric call) {
  live();
  TESSERA_CHECK_VALUE(call != nullptr, "engine.on_metric", "the function is empty");
  if (!logs_) return;
  watch_.listen(live());
  calls_.push_back(std::move(call));
}

void Session::add_writer(std::unique_ptr<io::MetricWriter> writer) {
  live();
  TESSERA_CHECK_VALUE(writer != nullptr, "engine.add_writer", "there is no writer");
  if (!logs_) return;
  watch_.listen(live());
  for (const auto& [text, samples] : warnings_)
    writer->warn(text, samples);
  writers_.push_back(std::move(writer));
}

void Session::write_metrics(const std::vector<io::Metric>& metrics) {
  live();
  io::check_metrics(metrics);
  // A function may add others, which get what comes after.
  for (size_t i = 0, count = writers_.size(); i < count; ++i)
    give(*writers_[i], [&] { writers_[i]->write(metrics); });
  auto call = calls_.begin();
  for (size_t left = calls_.size(); left > 0; --left, ++call)
    for (const io::Metric& metric : metrics)
      (*call)(metric.name, metric.value, metric.step);
}

std::vector<engine::CallRow> Session::comm_summary(bool stragglers) const {
  return watch_.call_rows(live(), stragglers);
}

Session::Forward::Forward(Session& session) : session_(session) {
  const bool training = session.module_->is_training();
  if (const auto recompute = session.watch_.profiles(session.live(), training)) {
    session.profiler_ = std::make_unique<FlopsProfiler>(session.module_, *recompute);
    profiled_.emplace(session.profiler_->start());
    session.profiler_->enter_model();
  }
  counted_.emplace(session.watch_, c10::GradMode::is_enabled() && training);
}

Session::Forward::~Forward() {
  counted_.reset();
  if (!profiled_) return;
  session_.profiler_->leave_model();
  profiled_->stop();
  try {
    session_.show_profile();
  } catch (const std::exception& error) {  // of a writer
    TORCH_WARN("[flops_profiler] ", error.what());
  }
}

void Session::show_profile() {
  const engine::Watch::Shown shown = watch_.show_profile(live(), profiler_->profile());
  if (!shown.text.empty()) watch_.line().end();
  std::fputs(shown.text.c_str(), stdout);
  std::fflush(stdout);
  warn(shown.warnings);
}

void Session::report_step() {
  const engine::Watch::Report report = watch_.stepped(live(), lr());
  if (!logs_) return;
  warn(report.warnings);
  for (const std::string& line : report.lines)
    watch_.line().say("[tessera] " + line);
  if (!report.progress.empty()) watch_.line().show("[tessera] " + report.progress);
  write_metrics(report.metrics);
}

}  // namespace tessera::nn

#include "tessera/pipeline/runner.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::pipeline {
namespace {

constexpr std::string_view kFailed = " failed in this batch: ";

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// The error with which another rank has ended a group.
std::optional<std::string> announced_by_abort(const std::string& text) {
  const size_t failed = text.find(kFailed), begin = text.rfind("[pipeline] stage ", failed);
  if (failed == std::string::npos || begin == std::string::npos) return std::nullopt;
  return first_line(text.substr(begin));
}

}  // namespace

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const StageFailed& failed) {
    return {.text = failed.what_without_backtrace(), .announced = true};
  } catch (const c10::DistBackendError& lost) {
    const std::string text = lost.what_without_backtrace();
    if (auto announced = announced_by_abort(text)) return {.text = *announced, .announced = true};
    return {.text = text, .lost = true};
  } catch (const c10::Error& known) {
    return {.text = known.what_without_backtrace()};
  } catch (const std::exception& other) {
    return {.text = other.what()};
  } catch (...) {
    return {.text = "an exception that is no std::exception"};
  }
}

Runner::Runner(Ranks ranks, std::shared_ptr<Ties> ties, int chunks, at::Device device,
               std::vector<comm::GroupPtr> beside)
    : ranks_(std::move(ranks)), ties_(std::move(ties)), wires_(ranks_, chunks, device), beside_(std::move(beside)) {}

void Runner::begin(const std::string& call) {
  TESSERA_CHECK(refused_.empty(), "engine", call, ": a batch has failed before (", refused_,
                "): stages are not at the same place any more; build a new engine and load a checkpoint");
  TESSERA_CHECK(call_.empty(), "engine", call, ": inside ", call_);
  call_ = call;
  under_way_ = false;
}

void Runner::fail(const Failure& failure) {
  if (failure.lost) announce(failure);
  if (failure.lost || under_way_) refused_ = first_line(failure.text);
  end();
}

Runner::Result Runner::run(Stage& stage, const Table& table, const Shape& shape, bool trains) {
  under_way_ = true;
  Run run(stage, wires_, shape, ranks_.stage(), trains);
  std::exception_ptr problem;
  Failure failure;
  double mean = 0;
  try {
    run.execute(table);
    mean = mean_of(run.losses);
  } catch (...) {
    problem = std::current_exception();
    failure = stage.explain(problem);
    if (!failure.announced && !failure.lost)
      failure.text = c10::str("[pipeline] ", ranks_.name(), kFailed, failure.text);
    announce(failure);
    if (failure.lost) throw;
  }
  const bool has_loss = !problem && !run.losses.empty();
  double sum = 0, count = 0, failed = 0;
  try {
    for (const auto& row : ranks_.rows({problem ? 1.0 : 0.0, has_loss ? 1.0 : 0.0, mean}, "the loss of a batch")) {
      failed += row[0];
      count += row[1];
      sum += row[1] != 0 ? row[2] : 0;
    }
    if (failed > 0) end_failed(problem, failure);
  } catch (const StageFailed&) {
    throw;
  } catch (const c10::DistBackendError&) {
    if (problem) std::rethrow_exception(problem);
    throw;
  }
  ranks_.flush();
  under_way_ = false;
  most_live_ = std::max(most_live_, run.most_live);
  Result result{{}, run.most_live, run.most_under_way};
  if (count > 0) result.loss = sum / count;
  return result;
}

// Over micro-batches, added up in fp32.
double Runner::mean_of(const Tensors& losses) const {
  if (losses.empty()) return 0;
  at::Tensor total = at::zeros({}, losses[0].options());
  for (const at::Tensor& loss : losses)
    total = total + loss.reshape({});
  return (total / static_cast<double>(losses.size())).item<double>();
}

// Some rank could not go on: its error there, and what it announces on all others.
void Runner::end_failed(const std::exception_ptr& problem, const Failure& failure) const {
  const bool own = problem && !failure.announced;
  const auto texts = ranks_.texts(own ? failure.text : "", "why a batch has failed");
  if (problem && own) std::rethrow_exception(problem);
  const auto text = std::ranges::find_if(texts, [](const std::string& each) { return !each.empty(); });
  TESSERA_FAIL(StageFailed, text != texts.end() ? *text : failure.text,
               "; this engine has ended with it, build a new one and load a checkpoint");
}

void Runner::announce(const Failure& failure) {
  auto wires = wires_.all();
  for (Wire* wire : ties_->outgoing())
    wires.push_back(wire);
  for (Wire* wire : wires) {
    try {
      wire->send_failure(failure.text);
    } catch (const c10::DistBackendError&) {
      // It is lost: nobody waits there.
    }
  }
  const std::string text = first_line(failure.text);
  for (const comm::GroupPtr& group : beside_)
    if (group->size() > 1) group->abort(text);
  if (failure.lost) ranks_.everyone->abort(text);
}

}  // namespace tessera::pipeline

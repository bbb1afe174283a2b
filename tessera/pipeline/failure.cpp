#include "tessera/pipeline/failure.h"

#include <algorithm>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/pipeline/wire.h"

namespace tessera::pipeline {
namespace {

// The error with which another rank has ended a group.
std::optional<std::string> announced_by_abort(const std::string& text) {
  const size_t failed = text.find(kFailed), begin = text.rfind("[pipeline] stage ", failed);
  if (failed == std::string::npos || begin == std::string::npos) return std::nullopt;
  return first_line(text.substr(begin));
}

}  // namespace

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

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

Attempt attempt(const Explain& explain, const std::function<std::vector<double>()>& own) {
  Attempt mine;
  try {
    mine.numbers = own();
  } catch (...) {
    mine.problem = std::current_exception();
    mine.failure = explain(mine.problem);
  }
  return mine;
}

std::vector<std::vector<double>> rows_of_all(const Ranks& ranks, const Attempt& mine, size_t count, comm::Label label,
                                             const std::function<void()>& end) {
  std::vector<double> row = mine.numbers;
  row.resize(count);
  row.push_back(mine.problem ? 1 : 0);
  auto rows = ranks.rows(row, label);
  if (std::ranges::any_of(rows, [](const auto& each) { return each.back() != 0; })) end();
  for (auto& each : rows)
    each.pop_back();
  return rows;
}

std::vector<std::vector<double>> agreed_rows(const Ranks& ranks, const std::string& could_not, const Explain& explain,
                                             size_t count, const std::function<std::vector<double>()>& own,
                                             comm::Label label) {
  const Attempt mine = attempt(explain, own);
  if (mine.failure.lost) std::rethrow_exception(mine.problem);
  return rows_of_all(ranks, mine, count, label, [&] {
    agree(*ranks.everyone,
          mine.problem ? c10::str("[pipeline] ", ranks.name(), " could not ", could_not, ": ", mine.failure.text) : "",
          ranks.device);
    std::rethrow_exception(mine.problem);
  });
}

std::string Building::text_of(const Failure& failure) const {
  return c10::str("[pipeline] ", where_, " failed while it was built: ", failure.text);
}

void Building::agree() const {
  pipeline::agree(*everyone_, "", device_);
}

void Building::fail(const Failure& failure) const {
  try {
    if (failure.lost) {
      everyone_->abort(text_of(failure));  // this rank has no exchange any more
    } else if (!failure.announced) {
      pipeline::agree(*everyone_, text_of(failure), device_);
    }
  } catch (const c10::DistBackendError&) {
    // Others are lost: this rank's own error says more.
  }
}

}  // namespace tessera::pipeline

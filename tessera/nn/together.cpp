#include "tessera/nn/together.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/pipeline/ranks.h"

namespace tessera::nn {

namespace {

// What fails on the ranks of one engine is an error on all.
double common_norm(const std::vector<Session*>& engines, const comm::Parts& parts, const std::vector<int>& copies) {
  double own = 0, squares = 0;
  std::exception_ptr problem;
  for (Session* engine : engines) {  // each: others of its ranks may hold no engine that failed
    std::vector<int> without;
    std::ranges::copy_if(copies, std::back_inserter(without),
                         [&](int id) { return engine->core().params()[id].group >= 0; });
    try {
      own += engine->core().norm_contribution(without);
    } catch (const c10::DistBackendError&) {
      throw;
    } catch (...) {
      if (!problem) problem = std::current_exception();
    }
  }
  const auto rows = pipeline::rows_of(*parts.everyone, {own, problem ? 1.0 : 0.0}, "the norm of several engines");
  if (problem) std::rethrow_exception(problem);
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    TESSERA_CHECK(rows[rank][1] == 0, "engine.step", "no engine was stepped: the norm failed on rank ", rank,
                  ", see the error there");
    squares += rows[rank][0];
  }
  return std::sqrt(squares);
}

// What keeps this rank from a step of `engine`; null where nothing does.
std::exception_ptr problem_of(Session& engine, bool boundary) {
  try {
    engine.core().check_step();
    const std::string fault = boundary ? engine.fault() : "";
    TESSERA_CHECK(fault.empty(), "engine.step", fault);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

bool step_all(const std::vector<Session*>& engines, const comm::Parts& parts, const std::vector<int>& copies) {
  bool boundary = false, between = false;
  std::exception_ptr problem;
  for (Session* engine : engines) {
    const engine::Engine& core = engine->core();
    const bool at_boundary = !core.options().managed_accumulation || core.is_gradient_accumulation_boundary();
    (at_boundary ? boundary : between) = true;
    if (!problem) problem = problem_of(*engine, at_boundary);
  }
  const std::vector<double> own{boundary ? 1.0 : 0.0, between ? 1.0 : 0.0, problem ? 1.0 : 0.0};
  const auto rows = pipeline::rows_of(*parts.everyone, own, "engines that step together");
  for (const auto& row : rows)
    TESSERA_CHECK(boundary != between && (row[0] != 0) == boundary && (row[1] != 0) == between, "engine.step",
                  "the engines were stepped apart: some are at an accumulation boundary, others between two; give them "
                  "the same gradient_accumulation_steps and step them together only");
  if (problem) std::rethrow_exception(problem);
  for (size_t rank = 0; rank < rows.size(); ++rank)
    TESSERA_CHECK(rows[rank][2] == 0, "engine.step", "no engine was stepped: rank ", rank,
                  " cannot step, see the error there");
  std::optional<double> norm;
  if (boundary) norm = common_norm(engines, parts, copies);
  bool applied = false;
  for (Session* engine : engines)
    applied = engine->step(norm);
  return applied;
}

}  // namespace

bool step_together(Session& engine, const comm::Parts& parts, const std::vector<int>& copies) {
  return parts.shapes.size() == 1 ? engine.step() : step_all({&engine}, parts, copies);
}

bool step_together(const std::vector<Session*>& engines, const comm::Parts& parts) {
  TESSERA_CHECK_VALUE(!engines.empty(), "engine.step", "there is no engine to step");
  return step_all(engines, parts, {});
}

}  // namespace tessera::nn

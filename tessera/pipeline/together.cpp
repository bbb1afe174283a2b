#include "tessera/pipeline/together.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <string>
#include <unordered_set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/pipeline/ranks.h"

namespace tessera::pipeline {
namespace {

using Rows = std::vector<std::vector<double>>;
using Engines = std::vector<Stepping*>;

// The first error of a call for each engine; a lost peer is thrown at once.
template <class F>
std::exception_ptr first_error(const Engines& engines, F call) {
  std::exception_ptr first;
  for (Stepping* engine : engines) {
    try {
      call(*engine);
    } catch (const c10::DistBackendError&) {
      throw;
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  return first;
}

class AllRanks {
 public:
  AllRanks(comm::Group* everyone, at::Device device) : everyone_(everyone), device_(device) {}
  bool alone() const { return everyone_ == nullptr; }
  Rows rows(const std::vector<double>& own, comm::Label label) const {
    return alone() ? Rows{own} : rows_of(*everyone_, own, label, device_);
  }

 private:
  comm::Group* everyone_;
  at::Device device_;
};

// Where a rank's engines are: {at a boundary, between two, cannot step}.
std::string moment_of(const std::vector<double>& row) {
  if (row[0] != 0) return row[1] != 0 ? "both" : "boundary";
  return row[1] != 0 ? "between" : "no engine";
}

int first_with(const Rows& rows, size_t column) {
  const auto found = std::ranges::find_if(rows, [&](const auto& row) { return row[column] != 0; });
  return found == rows.end() ? -1 : static_cast<int>(found - rows.begin());
}

// Whether all are at a boundary, all between two; UsageError where they are apart.
bool common_boundary(const Rows& rows) {
  const bool boundary = first_with(rows, 0) >= 0;
  if (!boundary || first_with(rows, 1) < 0) return boundary;
  std::string where;
  for (size_t rank = 0; rank < rows.size(); ++rank)
    where += c10::str(rank == 0 ? "" : "; ", "rank ", rank, ": ", moment_of(rows[rank]));
  TESSERA_CHECK(false, "step_together",
                "the engines were stepped apart: some are at an accumulation boundary, others between two (", where,
                "). Give them the same gradient_accumulation_steps and step them together only");
}

double common_norm(const Engines& engines, const AllRanks& all) {
  double own = 0;
  // Every engine is asked: other ranks of it may hold no engine that failed.
  const auto problem = first_error(engines, [&](Stepping& engine) { own += engine.square(all.alone()); });
  const Rows rows = all.rows({own, problem ? 1.0 : 0.0}, "the norm of several engines");
  if (problem) std::rethrow_exception(problem);
  const int failed = first_with(rows, 1);
  TESSERA_CHECK(failed < 0, "step_together", "no engine was stepped: the norm failed on rank ", failed,
                ", see the error there");
  double square = 0;
  for (const auto& row : rows)
    square += row[0];
  return std::sqrt(square);
}

void check_named(const Engines& engines, bool alone) {
  TESSERA_CHECK_VALUE(!alone || !engines.empty(), "step_together",
                      "there are no engines; a process without one passes the group of all");
  std::unordered_set<const void*> seen;
  for (const Stepping* engine : engines)
    TESSERA_CHECK_VALUE(seen.insert(engine->engine()).second, "step_together",
                        "an engine is named twice; pass each once");
}

}  // namespace

Stepped step_together(const Engines& engines, comm::Group* everyone, at::Device device) {
  check_named(engines, everyone == nullptr);
  const AllRanks all(everyone, device);
  bool boundary = false, between = false;
  for (Stepping* engine : engines)
    (engine->at_boundary() ? boundary : between) = true;
  bool goes_on = true;
  std::exception_ptr problem = first_error(engines, [&](Stepping& engine) {
    if (!std::exchange(goes_on, false)) return;
    engine.check(engine.at_boundary());
    goes_on = true;
  });
  const Rows rows =
      all.rows({boundary ? 1.0 : 0.0, between ? 1.0 : 0.0, problem ? 1.0 : 0.0}, "engines that step together");
  const bool all_at_boundary = common_boundary(rows);
  // Between two boundaries the ranks of an engine exchange nothing, so that nobody waits for this one.
  if (problem && !(all.alone() && all_at_boundary)) std::rethrow_exception(problem);
  const int stuck = first_with(rows, 2);
  TESSERA_CHECK(problem || stuck < 0, "step_together", "no engine was stepped: rank ", stuck,
                " cannot step, see the error there");
  for (Stepping* engine : engines)
    engine->checked();
  Stepped stepped;
  if (all_at_boundary) stepped.norm = common_norm(engines, all);
  problem = first_error(engines, [&](Stepping& engine) { stepped.applied = engine.step(stepped.norm); });
  if (problem) std::rethrow_exception(problem);
  return stepped;
}

}  // namespace tessera::pipeline

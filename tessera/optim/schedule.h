// Learning-rate schedules as functions of the step count. The numbers are DeepSpeed's, or torch's
// (docs/schedules.md).
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::optim {

enum class WarmupType { Log, Linear };
enum class AnnealStrategy { Cos, Linear };
enum class CycleMode { Triangular, Triangular2, ExpRange };
// Their names in configurations, in order.
const std::vector<std::string>& names_of(WarmupType);
const std::vector<std::string>& names_of(AnnealStrategy);
const std::vector<std::string>& names_of(CycleMode);

// Per-group values may be given as one value for all groups or one each. Defaults as in the
// reference tables.
struct WarmupLR {
  std::vector<double> warmup_min_lr{0.0};
  std::vector<double> warmup_max_lr{};  // empty: the optimizer's lr
  int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::Log;
};
struct WarmupDecayLR {
  int64_t total_num_steps = 0;  // required
  std::vector<double> warmup_min_lr{0.0};
  std::vector<double> warmup_max_lr{0.001};
  int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::Log;
};
struct WarmupCosineLR {
  int64_t total_num_steps = 0;  // required
  double warmup_min_ratio = 0.0;
  int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 1e-4;
  WarmupType warmup_type = WarmupType::Log;
};
struct OneCycle {
  std::vector<double> cycle_min_lr{0.0}, cycle_max_lr{0.0};  // required
  double decay_lr_rate = 0;
  int64_t cycle_first_step_size = 2000;
  std::optional<int64_t> cycle_second_step_size{};
  int64_t cycle_first_stair_count = 0;
  std::optional<int64_t> cycle_second_stair_count{};
  int64_t decay_step_size = 0;
  bool cycle_momentum = true;
  std::vector<double> cycle_min_mom{0.8}, cycle_max_mom{0.9};
  double decay_mom_rate = 0;
};
struct LRRangeTest {
  std::vector<double> lr_range_test_min_lr{1e-3};
  int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1.0;
  bool lr_range_test_staircase = false;
};

// Classes of torch.optim.lr_scheduler, with its names and defaults. Each group's own lr is where they begin.
struct StepLR {
  int64_t step_size = 0;  // required
  double gamma = 0.1;
};
struct MultiStepLR {
  std::vector<int64_t> milestones{};  // required; one that is there twice counts twice
  double gamma = 0.1;
};
struct ConstantLR {
  double factor = 1.0 / 3;
  int64_t total_iters = 5;
};
struct LinearLR {
  double start_factor = 1.0 / 3, end_factor = 1.0;
  int64_t total_iters = 5;
};
struct ExponentialLR {
  double gamma = 0;  // required
};
struct CosineAnnealingLR {
  int64_t T_max = 0;  // required
  double eta_min = 0;
};
struct PolynomialLR {
  int64_t total_iters = 5;
  double power = 1;
};
struct CosineAnnealingWarmRestarts {
  int64_t T_0 = 0;  // required
  int64_t T_mult = 1;
  double eta_min = 0;
};
// These two have rates of their own, whatever the groups' are, and move momentum as torch does: the first beta of optimizers that
// have betas, the momentum of others.
struct CyclicLR {
  std::vector<double> base_lr{}, max_lr{};  // required
  int64_t step_size_up = 2000;
  std::optional<int64_t> step_size_down{};
  CycleMode mode = CycleMode::Triangular;
  double gamma = 1;
  bool cycle_momentum = true;
  std::vector<double> base_momentum{0.8}, max_momentum{0.9};
};
struct OneCycleLR {
  std::vector<double> max_lr{};                                       // required
  std::optional<int64_t> total_steps{}, epochs{}, steps_per_epoch{};  // the first, or both others
  double pct_start = 0.3;
  AnnealStrategy anneal_strategy = AnnealStrategy::Cos;
  bool cycle_momentum = true;
  std::vector<double> base_momentum{0.85}, max_momentum{0.95};
  double div_factor = 25, final_div_factor = 1e4;
  bool three_phase = false;

  int64_t steps() const {
    const double of_epochs = double(epochs.value_or(0)) * double(steps_per_epoch.value_or(0));
    return total_steps.value_or(static_cast<int64_t>(of_epochs < 1e12 ? of_epochs : 1e12));
  }
};
using ScheduleOptions = std::variant<WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, StepLR,
                                     MultiStepLR, ConstantLR, LinearLR, ExponentialLR, CosineAnnealingLR, PolynomialLR,
                                     CosineAnnealingWarmRestarts, CyclicLR, OneCycleLR>;

inline constexpr int64_t kMostSteps = 1'000'000'000'000;

// An option by its name in configurations: one table, from which both front ends have names, defaults and bounds.
template <class Schedule>
struct ScheduleOption {
  using Where =
      std::variant<double Schedule::*, bool Schedule::*, int64_t Schedule::*, std::optional<int64_t> Schedule::*,
                   std::vector<double> Schedule::* /* one for all param groups, or one each */,
                   std::vector<int64_t> Schedule::* /* in any order, of any number */, WarmupType Schedule::*,
                   AnnealStrategy Schedule::*, CycleMode Schedule::*>;
  const char* name;
  Where where;
  int64_t least = 0, most = kMostSteps;  // of an integer
  bool required = false;
  bool may_be_null = true;    // in a configuration
  bool may_be_empty = false;  // of one for each param group
  // Of a number: from `from`, or above it, to `to`.
  double from = -std::numeric_limits<double>::infinity(), to = std::numeric_limits<double>::infinity();
  bool above = false;
};
// Why a number is beyond such bounds, "must be from 0 to 1"; empty where it is not.
std::string wrong_number(double value, double from, bool above, double to);
// The options of one of the types above, in the order of a constructor's arguments.
template <class Schedule>
const std::vector<ScheduleOption<Schedule>>& options_of();
template <>
const std::vector<ScheduleOption<WarmupLR>>& options_of();
template <>
const std::vector<ScheduleOption<WarmupDecayLR>>& options_of();
template <>
const std::vector<ScheduleOption<WarmupCosineLR>>& options_of();
template <>
const std::vector<ScheduleOption<OneCycle>>& options_of();
template <>
const std::vector<ScheduleOption<LRRangeTest>>& options_of();
template <>
const std::vector<ScheduleOption<StepLR>>& options_of();
template <>
const std::vector<ScheduleOption<MultiStepLR>>& options_of();
template <>
const std::vector<ScheduleOption<ConstantLR>>& options_of();
template <>
const std::vector<ScheduleOption<LinearLR>>& options_of();
template <>
const std::vector<ScheduleOption<ExponentialLR>>& options_of();
template <>
const std::vector<ScheduleOption<CosineAnnealingLR>>& options_of();
template <>
const std::vector<ScheduleOption<PolynomialLR>>& options_of();
template <>
const std::vector<ScheduleOption<CosineAnnealingWarmRestarts>>& options_of();
template <>
const std::vector<ScheduleOption<CyclicLR>>& options_of();
template <>
const std::vector<ScheduleOption<OneCycleLR>>& options_of();
// What no single option says: the name of one and what is wrong with it; empty texts where nothing is.
std::pair<std::string, std::string> wrong_together(const ScheduleOptions& options);
// A schedule by name, with its defaults; nothing for another name. Classes of torch.optim.lr_scheduler have their exact names, the
// others any letter case.
std::optional<ScheduleOptions> find_schedule(const std::string& name);
std::vector<std::string> schedule_names();
bool is_torchs(const ScheduleOptions& options);
const char* name_of(const ScheduleOptions& options);
const char* warmup_name(WarmupType type);  // "log" or "linear"

// What a schedule says for one iteration. Empty `momentum`: the schedule does not touch it.
struct ScheduleValues {
  std::vector<double> lr;        // one per param group
  std::vector<double> momentum;  // one per param group: the first beta; see put_momenta() in types.h
};

// Value error for invalid options; the message lists every wrong key. `groups`: number of param
// groups, 0 if unknown.
void check(const ScheduleOptions& options, size_t groups = 0);

// Where a schedule was evaluated last: torch's go from there, as each of their values is computed of the one before.
struct ScheduleCursor {
  int64_t iteration = -1;
  std::vector<double> lr;
};

// Values at `iteration` = number of steps the schedule has made, so optimizer step k (from 0) uses
// evaluate(k) and iteration 0 is what construction sets. The reference's last_batch_iteration is
// iteration - 1. base_lrs: the optimizer's lr per group when the schedule was made. The values do not
// depend on `cursor`, of the same options and rates, which saves the iterations before it. Value error as
// check(), and for an iteration behind the last one of OneCycleLR.
ScheduleValues evaluate(const ScheduleOptions& options, int64_t iteration, const std::vector<double>& base_lrs,
                        ScheduleCursor* cursor = nullptr);

}  // namespace tessera::optim

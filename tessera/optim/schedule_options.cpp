// The tables of options.
#include "tessera/optim/schedule.h"

namespace tessera::optim {
namespace {

template <class Schedule>
using Table = std::vector<ScheduleOption<Schedule>>;

constexpr int64_t kMostStairs = 1'000'000;

}  // namespace

const std::vector<std::string>& names_of(WarmupType) {
  static const std::vector<std::string> names{"log", "linear"};
  return names;
}

const std::vector<std::string>& names_of(AnnealStrategy) {
  static const std::vector<std::string> names{"cos", "linear"};
  return names;
}

const std::vector<std::string>& names_of(CycleMode) {
  static const std::vector<std::string> names{"triangular", "triangular2", "exp_range"};
  return names;
}

template <>
const Table<WarmupLR>& options_of<WarmupLR>() {
  using S = WarmupLR;
  static const Table<S> all{{"warmup_min_lr", &S::warmup_min_lr},
                            {"warmup_max_lr", &S::warmup_max_lr, 0, 0, false, true, /*may_be_empty=*/true},
                            {"warmup_num_steps", &S::warmup_num_steps, 1, kMostSteps, false, /*may_be_null=*/false},
                            {"warmup_type", &S::warmup_type}};
  return all;
}

template <>
const Table<WarmupDecayLR>& options_of<WarmupDecayLR>() {
  using S = WarmupDecayLR;
  static const Table<S> all{{"total_num_steps", &S::total_num_steps, 1, kMostSteps, /*required=*/true},
                            {"warmup_min_lr", &S::warmup_min_lr},
                            {"warmup_max_lr", &S::warmup_max_lr},
                            {"warmup_num_steps", &S::warmup_num_steps, 1, kMostSteps, false, /*may_be_null=*/false},
                            {"warmup_type", &S::warmup_type}};
  return all;
}

template <>
const Table<WarmupCosineLR>& options_of<WarmupCosineLR>() {
  using S = WarmupCosineLR;
  static const Table<S> all{{"total_num_steps", &S::total_num_steps, 1, kMostSteps, /*required=*/true},
                            {"warmup_min_ratio", &S::warmup_min_ratio},
                            {"warmup_num_steps", &S::warmup_num_steps, 1, kMostSteps, false, /*may_be_null=*/false},
                            {"cos_min_ratio", &S::cos_min_ratio},
                            {"warmup_type", &S::warmup_type}};
  return all;
}

template <>
const Table<OneCycle>& options_of<OneCycle>() {
  using S = OneCycle;
  static const Table<S> all{{"cycle_min_lr", &S::cycle_min_lr, 0, 0, /*required=*/true},
                            {"cycle_max_lr", &S::cycle_max_lr, 0, 0, /*required=*/true},
                            {"decay_lr_rate", &S::decay_lr_rate},
                            {"cycle_first_step_size", &S::cycle_first_step_size, 1},
                            {"cycle_second_step_size", &S::cycle_second_step_size},
                            {"cycle_first_stair_count", &S::cycle_first_stair_count, 0, kMostStairs},
                            {"cycle_second_stair_count", &S::cycle_second_stair_count, 0, kMostStairs},
                            {"decay_step_size", &S::decay_step_size},
                            {"cycle_momentum", &S::cycle_momentum},
                            {"cycle_min_mom", &S::cycle_min_mom},
                            {"cycle_max_mom", &S::cycle_max_mom},
                            {"decay_mom_rate", &S::decay_mom_rate}};
  return all;
}

template <>
const Table<LRRangeTest>& options_of<LRRangeTest>() {
  using S = LRRangeTest;
  static const Table<S> all{{"lr_range_test_min_lr", &S::lr_range_test_min_lr},
                            {"lr_range_test_step_size", &S::lr_range_test_step_size, 1},
                            {"lr_range_test_step_rate", &S::lr_range_test_step_rate},
                            {"lr_range_test_staircase", &S::lr_range_test_staircase}};
  return all;
}

template <>
const Table<StepLR>& options_of<StepLR>() {
  static const Table<StepLR> all{{"step_size", &StepLR::step_size, 1, kMostSteps, /*required=*/true},
                                 {"gamma", &StepLR::gamma}};
  return all;
}

template <>
const Table<MultiStepLR>& options_of<MultiStepLR>() {
  static const Table<MultiStepLR> all{{"milestones", &MultiStepLR::milestones, 0, 0, /*required=*/true},
                                      {"gamma", &MultiStepLR::gamma}};
  return all;
}

template <>
const Table<ConstantLR>& options_of<ConstantLR>() {
  using S = ConstantLR;
  static const Table<S> all{{.name = "factor", .where = &S::factor, .from = 0, .to = 1, .above = true},
                            {"total_iters", &S::total_iters}};
  return all;
}

template <>
const Table<LinearLR>& options_of<LinearLR>() {
  using S = LinearLR;
  static const Table<S> all{{.name = "start_factor", .where = &S::start_factor, .from = 0, .to = 1, .above = true},
                            {.name = "end_factor", .where = &S::end_factor, .from = 0, .to = 1},
                            {"total_iters", &S::total_iters}};
  return all;
}

template <>
const Table<ExponentialLR>& options_of<ExponentialLR>() {
  static const Table<ExponentialLR> all{{"gamma", &ExponentialLR::gamma, 0, 0, /*required=*/true}};
  return all;
}

template <>
const Table<CosineAnnealingLR>& options_of<CosineAnnealingLR>() {
  using S = CosineAnnealingLR;
  static const Table<S> all{{"T_max", &S::T_max, 1, kMostSteps, /*required=*/true}, {"eta_min", &S::eta_min}};
  return all;
}

template <>
const Table<PolynomialLR>& options_of<PolynomialLR>() {
  using S = PolynomialLR;
  static const Table<S> all{{"total_iters", &S::total_iters}, {"power", &S::power}};
  return all;
}

template <>
const Table<CosineAnnealingWarmRestarts>& options_of<CosineAnnealingWarmRestarts>() {
  using S = CosineAnnealingWarmRestarts;
  static const Table<S> all{{"T_0", &S::T_0, 1, kMostSteps, /*required=*/true},
                            {"T_mult", &S::T_mult, 1, kMostSteps, false, /*may_be_null=*/false},
                            {"eta_min", &S::eta_min, 0, 0, false, /*may_be_null=*/false}};
  return all;
}

template <>
const Table<CyclicLR>& options_of<CyclicLR>() {
  using S = CyclicLR;
  static const Table<S> all{{"base_lr", &S::base_lr, 0, 0, /*required=*/true},
                            {"max_lr", &S::max_lr, 0, 0, /*required=*/true},
                            {"step_size_up", &S::step_size_up, 1, kMostSteps, false, /*may_be_null=*/false},
                            {"step_size_down", &S::step_size_down},
                            {"mode", &S::mode},
                            {"gamma", &S::gamma},
                            {"cycle_momentum", &S::cycle_momentum},
                            {"base_momentum", &S::base_momentum},
                            {"max_momentum", &S::max_momentum}};
  return all;
}

template <>
const Table<OneCycleLR>& options_of<OneCycleLR>() {
  using S = OneCycleLR;
  static const Table<S> all{{"max_lr", &S::max_lr, 0, 0, /*required=*/true},
                            {"total_steps", &S::total_steps, 1},
                            {"epochs", &S::epochs, 1},
                            {"steps_per_epoch", &S::steps_per_epoch, 1},
                            {.name = "pct_start", .where = &S::pct_start, .from = 0, .to = 1},
                            {"anneal_strategy", &S::anneal_strategy},
                            {"cycle_momentum", &S::cycle_momentum},
                            {"base_momentum", &S::base_momentum},
                            {"max_momentum", &S::max_momentum},
                            {"div_factor", &S::div_factor},
                            {"final_div_factor", &S::final_div_factor},
                            {"three_phase", &S::three_phase}};
  return all;
}

}  // namespace tessera::optim

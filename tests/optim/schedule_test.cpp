#include "tessera/optim/schedule.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cmath>

namespace tessera::optim {
namespace {

struct Case {
  ScheduleOptions options;
  std::vector<double> base_lrs;
  std::vector<std::vector<double>> lr;        // per group, per iteration
  std::vector<std::vector<double>> momentum;  // empty: the schedule must not touch it
};

// Facts: what the reference's schedulers (0.19.8) set at construction and after each of their
// steps.
const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {WarmupLR{.warmup_max_lr = {0.01}, .warmup_num_steps = 5},
       {0.1},
       {{0.0, 0.0, 0.00430676558073393, 0.006826061944859854, 0.00861353116146786, 0.01, 0.01, 0.01, 0.01}},
       {}},
      {WarmupLR{
           .warmup_min_lr = {0.001}, .warmup_max_lr = {0.01}, .warmup_num_steps = 5, .warmup_type = WarmupType::Linear},
       {0.1},
       {{0.001, 0.001, 0.0028000000000000004, 0.004600000000000001, 0.0064, 0.008200000000000002, 0.010000000000000002,
         0.010000000000000002, 0.010000000000000002}},
       {}},
      {WarmupLR{.warmup_max_lr = {0.01}, .warmup_num_steps = 1}, {0.1}, {{0.0, 0.0, 0.01, 0.01, 0.01}}, {}},
      {WarmupLR{.warmup_max_lr = {0.01}, .warmup_num_steps = 1, .warmup_type = WarmupType::Linear},
       {0.1},
       {{0.0, 0.0, 0.005, 0.01, 0.01}},
       {}},
      {WarmupLR{.warmup_num_steps = 4},
       {0.1, 0.2},
       {{0.0, 0.0, 0.05, 0.07924812503605783, 0.1, 0.1, 0.1}, {0.0, 0.0, 0.1, 0.15849625007211565, 0.2, 0.2, 0.2}},
       {}},
      {WarmupLR{.warmup_min_lr = {0.0, 0.01}, .warmup_max_lr = {0.5, 0.6}, .warmup_num_steps = 4},
       {0.1, 0.2},
       {{0.0, 0.0, 0.25, 0.3962406251802891, 0.5, 0.5, 0.5}, {0.01, 0.01, 0.305, 0.4775639377127411, 0.6, 0.6, 0.6}},
       {}},
      {WarmupDecayLR{.total_num_steps = 10, .warmup_num_steps = 4},
       {0.1},
       {{0.0, 0.0, 0.0005, 0.0007924812503605781, 0.001, 0.001, 0.0008333333333333334, 0.0006666666666666666, 0.0005,
         0.0003333333333333333, 0.00016666666666666666, 0.0, 0.0, 0.0, 0.0}},
       {}},
      {WarmupDecayLR{.total_num_steps = 10,
                     .warmup_min_lr = {0.002},
                     .warmup_max_lr = {0.02},
                     .warmup_num_steps = 4,
                     .warmup_type = WarmupType::Linear},
       {0.1},
       {{0.002, 0.002, 0.006500000000000001, 0.011000000000000001, 0.015500000000000002, 0.020000000000000004, 0.017,
         0.014, 0.011000000000000001, 0.008, 0.005, 0.002, 0.002, 0.002, 0.002}},
       {}},
      {WarmupDecayLR{.total_num_steps = 3, .warmup_num_steps = 4},
       {0.1},
       {{0.0, 0.0, 0.0005, 0.0007924812503605781, 0.001, 0.0, 0.0}},
       {}},
      {WarmupDecayLR{.total_num_steps = 1, .warmup_num_steps = 1}, {0.1}, {{0.0, 0.0, 0.001, 0.0, 0.0, 0.0, 0.0}}, {}},
      {WarmupCosineLR{.total_num_steps = 10, .warmup_num_steps = 4},
       {0.1},
       {{0.0, 0.0, 0.05, 0.07924812503605783, 0.1, 0.09330194006220302, 0.0750025, 0.050005, 0.025007500000000012,
         0.006708059937796987, 1e-05, 1e-05, 1e-05, 1e-05, 1e-05}},
       {}},
      {WarmupCosineLR{.total_num_steps = 10,
                      .warmup_min_ratio = 0.1,
                      .warmup_num_steps = 4,
                      .cos_min_ratio = 0.2,
                      .warmup_type = WarmupType::Linear},
       {0.1, 0.3},
       {{0.0, 0.010000000000000002, 0.0325, 0.05500000000000001, 0.07750000000000001, 0.09464101615137757,
         0.08000000000000002, 0.06000000000000001, 0.040000000000000015, 0.02535898384862245, 0.020000000000000004,
         0.020000000000000004, 0.020000000000000004, 0.020000000000000004, 0.020000000000000004},
        {0.0, 0.03, 0.0975, 0.165, 0.23249999999999998, 0.2839230484541327, 0.24, 0.18000000000000002,
         0.12000000000000004, 0.07607695154586736, 0.06, 0.06, 0.06, 0.06, 0.06}},
       {}},
      {WarmupCosineLR{.total_num_steps = 3, .warmup_num_steps = 4},
       {0.1},
       {{0.0, 0.0, 0.05, 0.07924812503605783, 0.1, 1e-05, 1e-05}},
       {}},
      {WarmupCosineLR{.total_num_steps = 2, .warmup_num_steps = 2}, {0.1}, {{0.0, 0.0, 0.1, 1e-05, 1e-05}}, {}},
      {OneCycle{.cycle_min_lr = {0.01}, .cycle_max_lr = {0.1}, .cycle_first_step_size = 4},
       {0.1},
       {{0.01, 0.0325, 0.05500000000000001, 0.0775, 0.1, 0.0775, 0.05500000000000001, 0.0325, 0.01, 0.01, 0.01, 0.01,
         0.01, 0.01, 0.01}},
       {{0.8, 0.875, 0.8500000000000001, 0.8250000000000001, 0.8, 0.8250000000000001, 0.8500000000000001, 0.875, 0.9,
         0.9, 0.9, 0.9, 0.9, 0.9, 0.9}}},
      {OneCycle{.cycle_min_lr = {0.01},
                .cycle_max_lr = {0.1},
                .decay_lr_rate = 0.5,
                .cycle_first_step_size = 4,
                .decay_step_size = 2,
                .decay_mom_rate = 0.1},
       {0.1},
       {{0.01, 0.0325, 0.05500000000000001, 0.0775, 0.1, 0.0775, 0.05500000000000001, 0.0325, 0.01, 0.008,
         0.006666666666666667, 0.005714285714285714, 0.005, 0.0044444444444444444, 0.004, 0.0036363636363636364,
         0.0033333333333333335}},
       {{0.8, 0.875, 0.8500000000000001, 0.8250000000000001, 0.8, 0.8250000000000001, 0.8500000000000001, 0.875, 0.9,
         0.9450000000000001, 0.9900000000000001, 1.035, 1.08, 1.125, 1.1700000000000002, 1.215, 1.26}}},
      {OneCycle{.cycle_min_lr = {0.01},
                .cycle_max_lr = {0.1},
                .cycle_first_step_size = 6,
                .cycle_second_step_size = 3,
                .cycle_first_stair_count = 3,
                .cycle_second_stair_count = 1},
       {0.1},
       {{0.01, 0.01, 0.04, 0.04, 0.07, 0.07, 0.1, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01}},
       {{0.8, 0.9, 0.8666666666666667, 0.8666666666666667, 0.8333333333333334, 0.8333333333333334, 0.8, 0.9, 0.9, 0.9,
         0.9, 0.9, 0.9, 0.9, 0.9}}},
      {OneCycle{
           .cycle_min_lr = {0.01}, .cycle_max_lr = {0.1}, .cycle_first_step_size = 6, .cycle_first_stair_count = 2},
       {0.1},
       {{0.01, 0.01, 0.01, 0.05500000000000001, 0.05500000000000001, 0.05500000000000001, 0.1, 0.05500000000000001,
         0.05500000000000001, 0.05500000000000001, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01}},
       {{0.8, 0.9, 0.9, 0.8500000000000001, 0.8500000000000001, 0.8500000000000001, 0.8, 0.8500000000000001,
         0.8500000000000001, 0.8500000000000001, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9}}},
      {OneCycle{.cycle_min_lr = {0.01},
                .cycle_max_lr = {0.1},
                .decay_lr_rate = 0.5,
                .cycle_first_step_size = 4,
                .cycle_second_step_size = 2,
                .cycle_momentum = false},
       {0.1, 0.2},
       {{0.01, 0.032500000000000015, 0.055, 0.0775, 0.09999999999999999, 0.054999999999999966, 0.01, 0.01, 0.01, 0.01,
         0.01, 0.01, 0.01},
        {0.01, 0.032500000000000015, 0.055, 0.0775, 0.09999999999999999, 0.054999999999999966, 0.01, 0.01, 0.01, 0.01,
         0.01, 0.01, 0.01}},
       {}},
      {LRRangeTest{.lr_range_test_step_size = 3},
       {0.1},
       {{0.001, 0.0013333333333333333, 0.0016666666666666666, 0.002, 0.002333333333333333, 0.002666666666666667, 0.003,
         0.0033333333333333335, 0.0036666666666666666, 0.004}},
       {}},
      {LRRangeTest{.lr_range_test_min_lr = {0.01},
                   .lr_range_test_step_size = 3,
                   .lr_range_test_step_rate = 5.0,
                   .lr_range_test_staircase = true},
       {0.1, 0.2},
       {{0.01, 0.01, 0.01, 0.06, 0.06, 0.06, 0.11, 0.11, 0.11, 0.16},
        {0.01, 0.01, 0.01, 0.06, 0.06, 0.06, 0.11, 0.11, 0.11, 0.16}},
       {}},
      {LRRangeTest{.lr_range_test_min_lr = {0.01, 0.02}, .lr_range_test_step_size = 4, .lr_range_test_step_rate = 2.0},
       {0.1, 0.2},
       {{0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04}, {0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08}},
       {}}};
  return all;
}

TEST(Schedule, GivesTheReferenceNumbers) {
  for (size_t c = 0; c < cases().size(); ++c) {
    const Case& one = cases()[c];
    ASSERT_EQ(one.lr.size(), one.base_lrs.size());
    for (size_t i = 0; i < one.lr[0].size(); ++i) {
      SCOPED_TRACE("case " + std::to_string(c) + ", iteration " + std::to_string(i));
      const auto got = evaluate(one.options, int64_t(i), one.base_lrs);
      ASSERT_EQ(got.lr.size(), one.lr.size());
      for (size_t g = 0; g < got.lr.size(); ++g)
        EXPECT_NEAR(got.lr[g], one.lr[g][i], 1e-14 * std::max(1.0, std::abs(one.lr[g][i])));
      ASSERT_EQ(got.momentum.size(), one.momentum.size());
      for (size_t g = 0; g < got.momentum.size(); ++g)
        EXPECT_NEAR(got.momentum[g], one.momentum[g][i], 1e-14);
    }
  }
}

TEST(Schedule, StairsAreNotMovedByRounding) {
  // 7 of 21 steps on 3 stairs is exactly the first stair.
  const OneCycle o{.cycle_min_lr = {0},
                   .cycle_max_lr = {3},
                   .cycle_first_step_size = 21,
                   .cycle_second_step_size = 20,
                   .cycle_first_stair_count = 3};
  EXPECT_DOUBLE_EQ(evaluate(o, 6, {0.1}).lr[0], 0.0);
  EXPECT_DOUBLE_EQ(evaluate(o, 7, {0.1}).lr[0], 1.0);
}

std::string error_of(const ScheduleOptions& options, size_t groups) {
  try {
    evaluate(options, 0, std::vector<double>(groups, 0.1));
  } catch (const c10::ValueError& e) {
    return e.what_without_backtrace();
  }
  return "";
}

TEST(Schedule, RefusesWrongOptionsAllAtOnceAndNamesThem) {
  const std::string text = error_of(WarmupDecayLR{.total_num_steps = 0, .warmup_num_steps = -3}, 1);
  EXPECT_NE(text.find("[optim.schedule]"), std::string::npos) << text;
  EXPECT_NE(text.find("total_num_steps must be a positive integer"), std::string::npos) << text;
  EXPECT_NE(text.find("warmup_num_steps must be a positive integer"), std::string::npos) << text;
  EXPECT_EQ(error_of(WarmupLR{}, 1), "");
  EXPECT_NE(error_of(WarmupLR{.warmup_num_steps = 0}, 1).find("warmup_num_steps"), std::string::npos);
  EXPECT_NE(error_of(WarmupLR{.warmup_max_lr = {0.1, 0.2}}, 3).find("warmup_max_lr"), std::string::npos);
  EXPECT_NE(error_of(WarmupLR{.warmup_min_lr = {}}, 1).find("warmup_min_lr"), std::string::npos);
  EXPECT_NE(error_of(WarmupLR{.warmup_min_lr = {NAN}}, 1).find("warmup_min_lr"), std::string::npos);
  EXPECT_NE(error_of(OneCycle{.cycle_first_step_size = 0}, 1).find("cycle_first_step_size"), std::string::npos);
  EXPECT_NE(error_of(OneCycle{.cycle_first_stair_count = -1}, 1).find("cycle_first_stair_count"), std::string::npos);
  EXPECT_NE(error_of(LRRangeTest{.lr_range_test_step_size = 0}, 1).find("lr_range_test_step_size"), std::string::npos);
  EXPECT_THROW(evaluate(WarmupLR{}, -1, {0.1}), c10::ValueError);
}

TEST(Schedule, HasOneValuePerGroupAlsoForNoGroups) {
  EXPECT_TRUE(evaluate(WarmupLR{}, 3, {}).lr.empty());
  EXPECT_EQ(evaluate(OneCycle{}, 3, {0.1, 0.2, 0.3}).momentum.size(), 3u);
}

}  // namespace
}  // namespace tessera::optim

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

// Facts: what torch.optim.lr_scheduler's classes (2.13) set at construction and after each step.
const std::vector<Case>& cases_of_torch() {
  static const std::vector<Case> all{
      {StepLR{.step_size = 3},
       {0.1, 0.03},
       {{0.1, 0.1, 0.1, 0.010000000000000002, 0.010000000000000002, 0.010000000000000002, 0.0010000000000000002,
         0.0010000000000000002, 0.0010000000000000002},
        {0.03, 0.03, 0.03, 0.003, 0.003, 0.003, 0.00030000000000000003, 0.00030000000000000003,
         0.00030000000000000003}},
       {}},
      {StepLR{.step_size = 1, .gamma = 0.7},
       {0.1},
       {{0.1, 0.06999999999999999, 0.048999999999999995, 0.0343, 0.024009999999999997, 0.016806999999999996}},
       {}},
      {MultiStepLR{.milestones = {2, 5, 5, 7}, .gamma = 0.3},
       {0.1},
       {{0.1, 0.1, 0.03, 0.03, 0.03, 0.0026999999999999997, 0.0026999999999999997, 0.0008099999999999998,
         0.0008099999999999998}},
       {}},
      {ConstantLR{},
       {0.1, 0.03},
       {{0.03333333333333333, 0.03333333333333333, 0.03333333333333333, 0.03333333333333333, 0.03333333333333333, 0.1,
         0.1, 0.1},
        {0.009999999999999998, 0.009999999999999998, 0.009999999999999998, 0.009999999999999998, 0.009999999999999998,
         0.029999999999999995, 0.029999999999999995, 0.029999999999999995}},
       {}},
      {ConstantLR{.factor = 0.7, .total_iters = 0},
       {0.1},
       {{0.06999999999999999, 0.06999999999999999, 0.06999999999999999, 0.06999999999999999}},
       {}},
      {LinearLR{},
       {0.1, 0.03},
       {{0.03333333333333333, 0.04666666666666667, 0.060000000000000005, 0.07333333333333335, 0.08666666666666668, 0.1,
         0.1, 0.1},
        {0.009999999999999998, 0.013999999999999999, 0.018, 0.022, 0.026, 0.029999999999999995, 0.029999999999999995,
         0.029999999999999995}},
       {}},
      {LinearLR{.start_factor = 0.9, .end_factor = 0.2, .total_iters = 4},
       {0.1},
       {{0.09000000000000001, 0.07250000000000001, 0.055000000000000014, 0.03750000000000001, 0.02000000000000001,
         0.02000000000000001, 0.02000000000000001}},
       {}},
      {ExponentialLR{.gamma = 0.9},
       {0.1},
       {{0.1, 0.09000000000000001, 0.08100000000000002, 0.07290000000000002, 0.06561000000000002, 0.05904900000000002,
         0.05314410000000002, 0.04782969000000002, 0.043046721000000024, 0.03874204890000002}},
       {}},
      {CosineAnnealingLR{.T_max = 5},
       {0.1, 0.03},
       {{0.1, 0.09045084971874738, 0.06545084971874737, 0.03454915028125263, 0.009549150281252633, 0.0,
         0.009549150281252628, 0.03454915028125265, 0.06545084971874741, 0.09045084971874744, 0.10000000000000006,
         0.09045084971874746, 0.06545084971874743, 0.03454915028125267, 0.009549150281252644, 0.0},
        {0.03, 0.02713525491562421, 0.01963525491562421, 0.010364745084375787, 0.002864745084375789, 0.0,
         0.002864745084375788, 0.010364745084375793, 0.01963525491562422, 0.027135254915624227, 0.030000000000000016,
         0.027135254915624237, 0.019635254915624227, 0.0103647450843758, 0.0028647450843757934, 0.0}},
       {}},
      {CosineAnnealingLR{.T_max = 7, .eta_min = 0.01},
       {0.1},
       {{0.1, 0.09554359905560886, 0.08305704108364301, 0.06501344202803415, 0.04498655797196586, 0.026942958916356993,
         0.014456400944391143, 0.01, 0.01445640094439114, 0.026942958916356986}},
       {}},
      {PolynomialLR{},
       {0.1},
       {{0.1, 0.08000000000000002, 0.060000000000000005, 0.04000000000000001, 0.02, 0.0, 0.0, 0.0}},
       {}},
      {PolynomialLR{.total_iters = 7, .power = 2.5},
       {0.1},
       {{0.1, 0.06801943590165686, 0.04312011503716921, 0.02468339415570463, 0.012024251094636318, 0.004363448847549786,
         0.0007713560673657708, 0.0, 0.0, 0.0}},
       {}},
      {CosineAnnealingWarmRestarts{.T_0 = 3},
       {0.1, 0.03},
       {{0.1, 0.07500000000000001, 0.025000000000000012, 0.1, 0.07500000000000001, 0.025000000000000012, 0.1,
         0.07500000000000001},
        {0.03, 0.0225, 0.007500000000000003, 0.03, 0.0225, 0.007500000000000003, 0.03, 0.0225}},
       {}},
      {CosineAnnealingWarmRestarts{.T_0 = 2, .T_mult = 3, .eta_min = 0.01},
       {0.1},
       {{0.1, 0.05500000000000001, 0.1, 0.09397114317029975, 0.0775, 0.05500000000000001, 0.032500000000000015,
         0.01602885682970026, 0.1, 0.09931634888554937, 0.09728616793536589, 0.09397114317029975}},
       {}},
      {CyclicLR{.base_lr = {0.01}, .max_lr = {0.1, 0.3}, .step_size_up = 3},
       {0.5, 0.2},
       {{0.01, 0.040000000000000015, 0.06999999999999999, 0.1, 0.07000000000000003, 0.03999999999999998, 0.01,
         0.040000000000000056, 0.06999999999999995},
        {0.01, 0.1066666666666667, 0.20333333333333328, 0.3, 0.20333333333333342, 0.10666666666666656, 0.01,
         0.10666666666666683, 0.20333333333333314}},
       {{0.9, 0.8666666666666667, 0.8333333333333334, 0.8, 0.8333333333333334, 0.8666666666666667, 0.9,
         0.8666666666666666, 0.8333333333333335},
        {0.9, 0.8666666666666667, 0.8333333333333334, 0.8, 0.8333333333333334, 0.8666666666666667, 0.9,
         0.8666666666666666, 0.8333333333333335}}},
      {CyclicLR{.base_lr = {0.01},
                .max_lr = {0.1},
                .step_size_up = 2,
                .step_size_down = 3,
                .mode = CycleMode::Triangular2,
                .base_momentum = {0.7},
                .max_momentum = {0.95}},
       {0.5},
       {{0.01, 0.055, 0.09999999999999999, 0.06999999999999999, 0.039999999999999994, 0.01, 0.03250000000000002, 0.055,
         0.039999999999999994, 0.025000000000000015, 0.01, 0.021250000000000012, 0.0325}},
       {{0.95, 0.825, 0.7, 0.7833333333333333, 0.8666666666666667, 0.95, 0.8875, 0.825, 0.8666666666666667,
         0.9083333333333332, 0.95, 0.91875, 0.8875}}},
      {CyclicLR{.base_lr = {0.01},
                .max_lr = {0.1},
                .step_size_up = 3,
                .mode = CycleMode::ExpRange,
                .gamma = 0.9,
                .cycle_momentum = false},
       {0.5},
       {{0.01, 0.03700000000000001, 0.0586, 0.07561000000000001, 0.04936600000000002, 0.027714699999999988, 0.01,
         0.02434890700000003, 0.03582803259999999}},
       {}},
      {OneCycleLR{.max_lr = {0.1, 0.03}, .total_steps = 9},
       {0.5, 0.2},
       {{0.0040000000000000036, 0.06513582352345999, 0.09944154354509119, 0.08985666593464468, 0.07056447289910997,
         0.046263710266697504, 0.02287299531596481, 0.006089296975803242, 4e-07, 0.006089296975803236},
        {0.0011999999999999997, 0.019540747057037997, 0.02983246306352735, 0.0269569997803934, 0.021169341869732988,
         0.013879113080009251, 0.0068618985947894425, 0.0018267890927409723, 1.2e-07, 0.0018267890927409706}},
       {{0.95, 0.8863168504963959, 0.8505584586887436, 0.8601433746388538, 0.8794356448434694, 0.9037365046793212,
         0.9271273131932879, 0.9439110786685114, 0.95, 0.9439110786685114},
        {0.95, 0.8863168504963959, 0.8505584586887436, 0.8601433746388538, 0.8794356448434694, 0.9037365046793212,
         0.9271273131932879, 0.9439110786685114, 0.95, 0.9439110786685114}}},
      {OneCycleLR{.max_lr = {0.1},
                  .epochs = 2,
                  .steps_per_epoch = 5,
                  .pct_start = 0.37,
                  .anneal_strategy = AnnealStrategy::Linear,
                  .base_momentum = {0.8},
                  .max_momentum = {0.97},
                  .div_factor = 10,
                  .final_div_factor = 30,
                  .three_phase = true},
       {0.5},
       {{0.01, 0.043333333333333335, 0.07666666666666666, 0.09000000000000001, 0.05666666666666668,
         0.023333333333333345, 0.00838888888888889, 0.005703703703703705, 0.0030185185185185185, 0.00033333333333333305,
         -0.0023518518518518532}},
       {{0.97, 0.9070370370370371, 0.8440740740740741, 0.8188888888888889, 0.8818518518518519, 0.9448148148148148, 0.97,
         0.97, 0.97, 0.97, 0.97}}},
      {OneCycleLR{.max_lr = {0.1}, .total_steps = 11, .pct_start = 0.0, .cycle_momentum = false, .three_phase = true},
       {0.5},
       {{0.0037320776024881205, 0.0034142721410168574, 0.0030001, 0.0025177863263960206, 0.0020001999999999997,
         0.0014826136736039788, 0.0010003000000000004, 0.0005861278589831424, 0.00026832239751187946,
         6.854153258712141e-05, 4e-07, 6.854153258712096e-05}},
       {}},
  };
  return all;
}

TEST(Schedule, GivesTheBitsOfTorch) {
  for (size_t c = 0; c < cases_of_torch().size(); ++c) {
    const Case& one = cases_of_torch()[c];
    ScheduleCursor cursor, jumping;
    for (size_t i = 0; i < one.lr[0].size(); ++i)
      for (size_t g = 0; g < one.base_lrs.size(); ++g) {
        SCOPED_TRACE("case " + std::to_string(c) + ", iteration " + std::to_string(i));
        EXPECT_EQ(evaluate(one.options, int64_t(i), one.base_lrs).lr[g], one.lr[g][i]);
        EXPECT_EQ(evaluate(one.options, int64_t(i), one.base_lrs, &cursor).lr[g], one.lr[g][i]) << "from the last one";
        EXPECT_EQ(evaluate(one.options, int64_t(i), one.base_lrs, &jumping).lr[g], one.lr[g][i]);
        const std::vector<double> momentum = evaluate(one.options, int64_t(i), one.base_lrs).momentum;
        EXPECT_EQ(momentum.empty(), one.momentum.empty());
        if (!momentum.empty()) {
          EXPECT_EQ(momentum[g], one.momentum[g][i]);
        }
        evaluate(one.options, int64_t(i * 7 % 5), one.base_lrs, &jumping);
      }
  }
}

TEST(Schedule, AOneCycleOfTorchEnds) {
  const OneCycleLR nine{.max_lr = {0.1}, .total_steps = 9},
      short_one{.max_lr = {0.1}, .total_steps = 2, .pct_start = 0.5};
  const auto text = [](const OneCycleLR& options, int64_t at) {
    try {
      evaluate(options, at, {0.1});
    } catch (const c10::ValueError& e) {
      return std::string(e.what_without_backtrace());
    }
    return std::string();
  };
  EXPECT_EQ(text(nine, 9), "");
  EXPECT_NE(text(nine, 10).find("OneCycleLR is of 9 steps, and this is step 10"), std::string::npos);
  EXPECT_NE(text(short_one, 0).find("has a phase of no step"), std::string::npos);
  EXPECT_NE(text(OneCycleLR{.max_lr = {0.1}, .epochs = 2}, 0).find("total_steps is required, or epochs and"),
            std::string::npos);
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
  EXPECT_NE(error_of(StepLR{}, 1).find("step_size must be a positive integer"), std::string::npos);
  EXPECT_NE(error_of(ConstantLR{.factor = 1.5}, 1).find("factor must be above 0"), std::string::npos);
  EXPECT_NE(error_of(LinearLR{.start_factor = 0}, 1).find("start_factor must be above 0"), std::string::npos);
  EXPECT_NE(error_of(CosineAnnealingLR{}, 1).find("T_max must be a positive integer"), std::string::npos);
  EXPECT_NE(error_of(PolynomialLR{.total_iters = -1}, 1).find("total_iters must be from 0"), std::string::npos);
}

TEST(Schedule, HasOneValuePerGroupAlsoForNoGroups) {
  EXPECT_TRUE(evaluate(WarmupLR{}, 3, {}).lr.empty());
  EXPECT_EQ(evaluate(OneCycle{}, 3, {0.1, 0.2, 0.3}).momentum.size(), 3u);
}

}  // namespace
}  // namespace tessera::optim

// Schedules of the loss scale against tables worked out by hand.
#include "tessera/amp/grad_scaler.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace tessera::amp {
namespace {

// `steps`: '.' a good step, 'x' an overflow. The scale after each, as a power of two.
std::vector<double> powers(GradScaler& scaler, const std::string& steps) {
  std::vector<double> result;
  for (const char step : steps) {
    scaler.update(step == 'x');
    result.push_back(std::log2(scaler.scale()));
  }
  return result;
}

std::vector<double> powers(const ScalerOptions& options, const std::string& steps) {
  GradScaler scaler(options);
  return powers(scaler, steps);
}

using Powers = std::vector<double>;

ScalerOptions dynamic(double initial_power, int64_t window, int64_t hysteresis = 1) {
  return {.dynamic = true, .initial = std::exp2(initial_power), .window = window, .hysteresis = hysteresis};
}

TEST(GradScaler, GrowsAfterEveryWindowOfGoodSteps) {
  EXPECT_EQ(powers(dynamic(8, 2), "......"), (Powers{8, 9, 9, 10, 10, 11}));
  EXPECT_EQ(powers(dynamic(8, 3), "......."), (Powers{8, 8, 9, 9, 9, 10, 10}));
}

TEST(GradScaler, LateGrowthComesOneStepLaterAtFirst) {
  ScalerOptions options = dynamic(8, 2);
  options.late_growth = true;
  EXPECT_EQ(powers(options, "......x......"), (Powers{8, 8, 9, 9, 10, 10, 9, 9, 9, 10, 10, 11, 11}));
  options.window = 1;
  EXPECT_EQ(powers(options, "...x.."), (Powers{8, 9, 10, 9, 9, 10}));
}

TEST(GradScaler, AnOverflowHalvesAndStartsTheWindowAgain) {
  EXPECT_EQ(powers(dynamic(8, 3), "..x..x...xx...."), (Powers{8, 8, 7, 7, 7, 6, 6, 6, 7, 6, 5, 5, 5, 6, 6}));
}

TEST(GradScaler, StageZeroHalvesToTheMinimumAndNeverFails) {
  // Eight overflows from 2^4 end at 1.
  EXPECT_EQ(powers(dynamic(4, 1000), "xxxxxxxx"), (Powers{3, 2, 1, 0, 0, 0, 0, 0}));
  ScalerOptions options = dynamic(4, 1000);
  options.minimum = 4;
  EXPECT_EQ(powers(options, "xxxx"), (Powers{3, 2, 2, 2}));
}

TEST(GradScaler, HysteresisIsABudgetOfOverflows) {
  // Once used up, every overflow lowers the scale, until a growth refills the budget.
  EXPECT_EQ(powers(dynamic(8, 3, 2), "x.x.x...xx"), (Powers{8, 8, 7, 7, 6, 6, 6, 7, 7, 6}));
  EXPECT_EQ(powers(dynamic(8, 100, 3), "xxxxx"), (Powers{8, 8, 7, 6, 5}));
}

TEST(GradScaler, ConsecutiveHysteresisRefillsOnAGoodStep) {
  ScalerOptions options = dynamic(8, 100, 2);
  options.refill_on_good = true;
  EXPECT_EQ(powers(options, "x.x.xx.xx"), (Powers{8, 8, 8, 8, 8, 7, 7, 7, 6}));
}

TEST(GradScaler, AnOverflowAtTheMinimumIsAnErrorWhereAskedFor) {
  ScalerOptions options = dynamic(2, 2, 2);
  options.error_at_minimum = true;
  GradScaler scaler(options);
  EXPECT_EQ(powers(scaler, "xxx"), (Powers{2, 1, 0}));
  const auto before = scaler.state();
  try {
    scaler.update(true);
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("already at minimum"), std::string::npos);
  }
  EXPECT_EQ(scaler.state().steps, before.steps);
  EXPECT_EQ(powers(scaler, ".."), (Powers{0, 1})) << "it can go on";
  // With budget left the overflow is only counted.
  options.initial = 1;
  EXPECT_EQ(powers(options, "x"), (Powers{0}));
}

TEST(GradScaler, TorchRules) {
  GradScaler scaler(ScalerOptions::autocast());
  EXPECT_EQ(scaler.scale(), 65536);
  for (int i = 0; i < 1999; ++i)
    scaler.update(false);
  EXPECT_EQ(scaler.scale(), 65536);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 131072);
  for (int i = 0; i < 20; ++i)
    scaler.update(true);
  EXPECT_EQ(scaler.scale(), 0.125) << "no minimum";
  scaler.set_scale(std::exp2(127));
  for (int i = 0; i < 2000; ++i)
    scaler.update(false);
  EXPECT_EQ(scaler.scale(), std::exp2(127)) << "what fp32 cannot hold is not reached";
}

TEST(GradScaler, AStaticScaleStays) {
  EXPECT_EQ(powers(ScalerOptions::fixed(128), "xx..x"), (Powers{7, 7, 7, 7, 7}));
  EXPECT_TRUE(GradScaler(ScalerOptions::fixed(128)).needed());
  EXPECT_FALSE(GradScaler(ScalerOptions::fixed(128)).dynamic());
  EXPECT_FALSE(GradScaler(ScalerOptions::off()).needed());
  EXPECT_TRUE(GradScaler(dynamic(0, 5)).needed()) << "1 now, but not for ever";
}

TEST(GradScaler, SettingKeepsCountingAndOverridingStopsIt) {
  GradScaler scaler(dynamic(8, 4));
  EXPECT_EQ(powers(scaler, "..."), (Powers{8, 8, 8}));
  scaler.set_scale(32);
  EXPECT_EQ(powers(scaler, ".x"), (Powers{6, 5}));
  scaler.override_scale(2);
  EXPECT_FALSE(scaler.dynamic());
  EXPECT_EQ(powers(scaler, "x.....x"), (Powers{1, 1, 1, 1, 1, 1, 1}));
  GradScaler off;
  off.override_scale(1);
  EXPECT_TRUE(off.needed()) << "a user's own scale is guarded whatever it is";
}

TEST(GradScaler, GoesOnFromASavedState) {
  ScalerOptions options = dynamic(8, 3, 2);
  GradScaler whole(options), first(options), second(options);
  const Powers expected = powers(whole, "x..x....xx...");
  Powers got = powers(first, "x..x..");
  second.restore(first.state());
  for (const double power : powers(second, "..xx..."))
    got.push_back(power);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(second.state().steps, 13);
}

TEST(GradScaler, RefusesNonsense) {
  for (const double scale : {0.0, -1.0, std::nan(""), HUGE_VAL, 1e300}) {
    EXPECT_THROW(GradScaler(ScalerOptions::fixed(scale)), c10::ValueError) << scale;
    EXPECT_THROW(GradScaler().set_scale(scale), c10::ValueError) << scale;
    EXPECT_THROW(GradScaler().override_scale(scale), c10::ValueError) << scale;
  }
  EXPECT_THROW(GradScaler(dynamic(8, 0)), c10::ValueError);
  EXPECT_THROW(GradScaler(dynamic(8, 2, 0)), c10::ValueError);
  EXPECT_THROW(GradScaler().restore({.scale = 0}), c10::ValueError);
}

}  // namespace
}  // namespace tessera::amp

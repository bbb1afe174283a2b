#include "tessera/engine/device_share.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/modes.h"

namespace tessera::engine {

using amp::Master;
using amp::PrecisionPolicy;
using offload::Rates;

namespace {

constexpr double kParameters = 1.3643e9;
// One H100 (bench/reports/h100): what its bus, host and host memory were measured to take.
const Rates kH100{.bus = 50e9, .host = 145e9, .memory = 150e9, .device = 3e12};

double milliseconds(const UpdateBytes& bytes, const Rates& rates, double share) {
  return update_time(bytes, rates, share).longest() * kParameters * 1e3;
}

}  // namespace

TEST(DeviceShare, BytesOfTheForms) {
  struct Row {
    PrecisionPolicy precision;
    int moments;
    double through, kernel;
  };
  const auto mode = [](at::ScalarType dtype, Master master, at::ScalarType state) {
    return testing::mode(dtype, master, state);
  };
  for (const Row& row : {Row{PrecisionPolicy::bf16(), 2, 10, 26}, Row{PrecisionPolicy::fp16(), 2, 12, 30},
                         Row{PrecisionPolicy::fp32(), 2, 8, 28}, Row{PrecisionPolicy::fp32(), 1, 4, 20},
                         Row{mode(at::kBFloat16, Master::Weight, at::kFloat), 2, 8, 22}}) {
    const auto weight = static_cast<double>(at::elementSize(row.precision.param));
    const UpdateBytes here = update_bytes(row.precision, row.moments, false, false);
    EXPECT_EQ(here.through, row.through);
    EXPECT_EQ(here.of_host, weight) << "the same each way";
    EXPECT_EQ(here.kernel, row.kernel);
    const UpdateBytes away = update_bytes(row.precision, row.moments, /*weights=*/true, /*disk=*/true);
    EXPECT_EQ(away.through, row.through + weight);
    EXPECT_EQ(away.of_host, 0);
    EXPECT_EQ(away.disk, 2 * row.through);
  }
}

// The figures of a byte model on paper: 14 bytes, 1.36 billion parameters.
TEST(DeviceShare, PredictsAnH100) {
  const UpdateBytes bytes = update_bytes(PrecisionPolicy::bf16(), 2, false, false);
  const double share = best_share(bytes, kH100);
  EXPECT_NEAR(share, .706, .001);
  EXPECT_NEAR(milliseconds(bytes, kH100, 0), 273, 1) << "host only";
  EXPECT_NEAR(milliseconds(bytes, kH100, 1), 273, 1) << "device only";
  EXPECT_NEAR(milliseconds(bytes, kH100, share), 209, 1);
}

// The same on paper for steps of which 194 ms are compute, 128 of them the backward; docs/devices.md has them rounded, with room.
TEST(DeviceShare, PredictsTheStepsOfAnH100) {
  const PrecisionPolicy split = PrecisionPolicy::bf16();
  const auto narrow = [](Master master) { return testing::mode(at::kBFloat16, master, at::kBFloat16); };
  const PrecisionPolicy fp32 = PrecisionPolicy::fp32(), plain = testing::mode(at::kBFloat16, Master::Fp32, at::kFloat);
  const PrecisionPolicy ten = narrow(Master::Split), eight = narrow(Master::Weight);
  struct Row {
    PrecisionPolicy precision;
    double share;
    bool in_backward, runs_on;
    double step;
  };
  for (const Row& row :
       {Row{split, 0, false, false, 467}, Row{split, 0, false, true, 401}, Row{split, 0, true, false, 339},
        Row{split, 0, true, true, 273}, Row{split, .706, false, false, 403}, Row{split, .706, true, false, 275},
        Row{split, .706, true, true, 209}, Row{fp32, 0, false, false, 521}, Row{plain, 0, false, false, 503},
        Row{ten, 1, false, false, 358}, Row{ten, 1, true, false, 230}, Row{eight, 1, false, false, 303},
        Row{eight, 1, true, false, 194}, Row{eight, 1, true, true, 194}}) {
    const double update = milliseconds(update_bytes(row.precision, 2, false, false), kH100, row.share);
    StepTime step{.forward = 66, .backward = 128, .in_backward = row.in_backward, .runs_on = row.runs_on};
    EXPECT_NEAR(step_time(step, update), row.step, 1);
    step.micro_batches = 3;
    EXPECT_NEAR(step_time(step, update), row.step + 2 * 194, 1) << "the update comes once";
  }
}

// 6.74 billion parameters, recomputed: 248 ms of compute, of which the backward is 186.
TEST(DeviceShare, PredictsTheStepsOfALargerModel) {
  struct Row {
    PrecisionPolicy precision;
    double share;
    bool runs_on;
    double step;
  };
  const PrecisionPolicy eight = testing::mode(at::kBFloat16, Master::Weight, at::kBFloat16);
  for (const Row& row : {Row{eight, 1, false, 601}, Row{eight, 1, true, 539},
                         Row{PrecisionPolicy::bf16(), 0, true, 1348}, Row{PrecisionPolicy::bf16(), .706, true, 1033}}) {
    const double update =
        milliseconds(update_bytes(row.precision, 2, false, false), kH100, row.share) * 6.74e9 / kParameters;
    const StepTime step{.forward = 62, .backward = 186, .in_backward = true, .runs_on = row.runs_on};
    EXPECT_NEAR(step_time(step, update), row.step, 3);
  }
}

// No other share is faster, whatever the machine, and what is left to the host is as much as it can do in that time.
TEST(DeviceShare, IsTheFastest) {
  for (const auto& precision : {PrecisionPolicy::bf16(), PrecisionPolicy::fp16(), PrecisionPolicy::fp32()})
    for (const bool weights : {false, true})
      for (const double bus : {1e9, 12e9, 50e9, 400e9})
        for (const double host : {4e9, 30e9, 150e9, 600e9})
          for (const double disk : {0.0, 3e9}) {
            const Rates rates{
                .bus = bus, .host = host, .memory = std::max(host, 2 * bus), .device = 3e10, .disk = disk};
            const UpdateBytes bytes = update_bytes(precision, 2, weights, disk > 0);
            const double share = best_share(bytes, rates), best = milliseconds(bytes, rates, share);
            EXPECT_GE(share, 0);
            EXPECT_LE(share, 1);
            for (int hundredth = 0; hundredth <= 100; ++hundredth)
              EXPECT_GE(milliseconds(bytes, rates, hundredth / 100.0), best * (1 - 1e-9)) << bus << " " << host;
          }
  const UpdateBytes bytes = update_bytes(PrecisionPolicy::bf16(), 2, false, false);
  EXPECT_EQ(best_share(bytes, {.bus = 1e9, .host = 1e12, .memory = 1e12}), 0) << "a slow bus: nothing passes it";
  EXPECT_GT(best_share(bytes, {.bus = 1e12, .host = 1e9, .memory = 1e13}), .999) << "a slow host does nearly nothing";
  const Rates alike{.bus = 1e12, .host = 26e9, .memory = 1e13, .device = 46e9};  // a kernel's 26 bytes, 20 of tiles
  EXPECT_NEAR(best_share(bytes, alike), .5, 1e-6) << "a device as slow as the host does half";
}

// A disk is no slower for a share, nor faster.
TEST(DeviceShare, ADiskIsALeastTime) {
  const Rates slow{.bus = 50e9, .host = 145e9, .memory = 150e9, .disk = 2e9};
  const UpdateBytes bytes = update_bytes(PrecisionPolicy::bf16(), 2, false, true);
  EXPECT_NEAR(best_share(bytes, slow), .706, .001);
  for (const double share : {0.0, .5, 1.0})
    EXPECT_DOUBLE_EQ(update_time(bytes, slow, share).longest(), 20 / 2e9);
}

TEST(DeviceShare, WhatDoesNotFitLivesElsewhere) {
  EXPECT_EQ(ratio_that_fits({.bytes = 1200, .elements = 100, .stays = 12}), 0);
  EXPECT_EQ(ratio_that_fits({.bytes = 5000, .elements = 100, .stays = 12}), 0);
  EXPECT_EQ(ratio_that_fits({.bytes = 0, .elements = 100, .stays = 12}), 1);
  EXPECT_EQ(ratio_that_fits({.bytes = -700, .elements = 100, .stays = 12}), 1);
  EXPECT_DOUBLE_EQ(ratio_that_fits({.bytes = 900, .elements = 100, .stays = 12}), .25);
  EXPECT_DOUBLE_EQ(ratio_that_fits({.bytes = 700, .elements = 100, .stays = 12, .is_away = 2}), .5) << "gradients";
  EXPECT_EQ(ratio_that_fits({.bytes = 10, .elements = 0, .stays = 12}), 0);
  EXPECT_EQ(ratio_that_fits({.bytes = -10, .elements = 100, .stays = 2, .is_away = 2}), 0) << "nothing is won by it";
}

}  // namespace tessera::engine

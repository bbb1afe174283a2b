// Tiles of an update whose states or weights do not live on the device: what moves, and when.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tessera/config/resolve.h"
#include "tessera/engine/engine.h"
#include "tessera/offload/states.h"
#include "tessera/shard/cut.h"
#include "tests/io/temp_folder.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/modes.h"
#include "tests/support/training.h"

namespace tessera::testing {

using amp::PrecisionPolicy;
using engine::Engine;

namespace {
const c10::Device kAccelerator(c10::kPrivateUse1, 0);
}

// What the device holds is weights. Tile k + 1 is on its way to the host before tile k is updated and sent back.
TEST(DeviceTiles, TilesPassThroughTheHost) {
  static std::vector<std::pair<bool, int64_t>> copies;  // to the host; elements. Smaller ones are those of the norm
  constexpr int64_t kTile = shard::kTile, kLast = 1 << 16, kSize = 2 * kTile + kLast;
  for (const auto residence : {shard::Residence::Host, shard::Residence::Nvme}) {
    const io::TempFolder folder;
    const int64_t before = tessera_stand_in_bytes();
    at::Tensor weight = at::zeros({kSize}, kAccelerator).requires_grad_(true);
    engine::Options options = toy_options({.stage = 1, .precision = PrecisionPolicy::fp32()});
    options.zero.home = offload::state_homes({.residence = residence, .folder = folder.path()});
    Engine engine(options, comm::Mesh(), {{"w", weight, 0, ""}}, {toy_adamw()});
    const auto memory = engine.memory();
    EXPECT_EQ(memory.host, (residence == shard::Residence::Host ? 12 : 4) * kSize);
    EXPECT_EQ(memory.disk, (residence == shard::Residence::Host ? 0 : 8) * kSize);
    copies.clear();
    tessera_stand_in_on_copy([](bool to_host, int64_t bytes) {
      if (bytes >= 4 * kLast) copies.emplace_back(to_host, bytes / 4);
    });
    weight.sum().backward();
    engine.step();
    tessera_stand_in_on_copy(nullptr);
    const std::vector<std::pair<bool, int64_t>> expected{{true, kSize},  // the gradient, in the backward
                                                         {true, kTile}, {true, kTile},  {false, kTile},
                                                         {true, kLast}, {false, kTile}, {false, kLast}};
    EXPECT_EQ(copies, expected);
    EXPECT_NEAR(static_cast<double>(tessera_stand_in_bytes() - before), 4.0 * kSize, 0.01 * kSize);
  }
}

// A tile ends within a row of the columns that this is of a matrix: random bits do not change.
TEST(DeviceTiles, TilesKeepTheNumbersOfACut) {
  const auto train = [](shard::Residence residence) {
    const at::Tensor values = at::linspace(-1, 1, 2100 * 2000).view({2100, 2000});
    std::vector<engine::ParamSpec> specs{{"w", values.to(kAccelerator).requires_grad_(true), 0, ""}};
    specs[0].cut = shard::cut_along({2100, 2011}, 1, {{5, 2005}});
    engine::Options options =
        toy_options({.stage = 1, .clip = 0, .precision = mode(at::kBFloat16, amp::Master::Weight, at::kBFloat16)});
    options.zero.home = offload::state_homes({.residence = residence});
    Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
    for (int step = 0; step < 2; ++step) {
      specs[0].tensor.to(at::kFloat).square().sum().backward();
      engine.step();
    }
    return specs[0].tensor.detach().cpu();
  };
  static_assert(2100 * 2000 > shard::kTile && shard::kTile % 2000 != 0);
  EXPECT_TRUE(train(shard::Residence::Device).equal(train(shard::Residence::Host)));
}

// With 8 bytes a parameter.
config::Config of_json(bool weights, shard::Residence residence, const std::string& folder) {
  const std::string where =
      residence == shard::Residence::Host ? R"("cpu")" : R"("nvme", "nvme_path": ")" + folder + '"';
  return config::Config::from_json(
      R"({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": true,
      "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}, "tessera": {"state_bytes": 8},
      "zero_optimization": {"stage": 3, ")" +
      std::string(weights ? R"(offload_param": {"max_in_cpu": 0, )" : R"(offload_optimizer": {)") + R"("device": )" +
      where + "}}}");
}

// What the device updates and what lives elsewhere, weights or states of 16 bits: nothing waits for the way there or, in host
// memory, back; of what goes to a disk the host waits for a tile once the next one is on its way back. Gradients stay on the device,
// but for steps of several micro-batches.
TEST(DeviceTiles, TilesPassThroughTheDevice) {
  static std::string log;  // '<' a copy to the device, '>' one to the host, 'w' the host waits, once or several times
  constexpr int64_t kLast = 1 << 16, kSize = 2 * shard::kTile + kLast;
  const PrecisionPolicy fp32 = PrecisionPolicy::fp32(),
                        narrow = mode(at::kBFloat16, amp::Master::Weight, at::kBFloat16);
  const io::TempFolder folder;
  struct Row {
    bool weights, early;
    shard::Residence residence;
    std::string expected;
    double bytes;  // an element, on the device: weights, and those of gradients and states for the tiles on their way
    int accumulation = 1;
  };
  const double tiles = 3.0 * shard::kTile / kSize;
  for (const Row& row : {Row{true, false, shard::Residence::Host, "<><><>", 12 + 4 * tiles},
                         Row{true, false, shard::Residence::Nvme, "<><>w<>w", 12 + 4 * tiles},
                         Row{false, false, shard::Residence::Host, "<<>><<>><<>>", 2 + 4 * tiles},
                         Row{false, false, shard::Residence::Host, "<<<>><<<>><<<>>", 2 + 6 * tiles, 2},
                         Row{false, false, shard::Residence::Nvme, "<<>><<>>w<<>>w", 2 + 4 * tiles},
                         Row{false, true, shard::Residence::Host, "<<>><<>><<>>", 2 + 4 * tiles}}) {
    const int64_t before = tessera_stand_in_bytes();
    PrecisionPolicy precision = row.weights ? fp32 : narrow;
    precision.skip_nonfinite = precision.skip_nonfinite && !row.early;
    at::Tensor weight = at::zeros({kSize}, kAccelerator).requires_grad_(true);
    engine::Options options = toy_options({.stage = 3,
                                           .accumulation = row.accumulation,
                                           .clip = row.early ? 0.0 : 1.0,
                                           .precision = precision,
                                           .in_backward = row.early});
    const zero::Options configured = config::zero_options(of_json(row.weights, row.residence, folder.path()));
    options.zero.home = configured.home;
    options.zero.weight_home = configured.weight_home;
    Engine engine(options, comm::Mesh(), {{"w", weight, 0, ""}}, {toy_adamw()});
    const int module = engine.modules().add({0});
    for (int number = 0; number < 2; ++number) {  // in the first one memory is made
      if (module >= 0) engine.modules().enter(module);
      const at::Tensor loss = weight.sum();
      if (module >= 0) engine.modules().leave(module, {loss});
      const auto listen = [&] {
        log.clear();
        tessera_stand_in_on_copy([](bool to_host, int64_t bytes) {
          if (bytes >= 2 * kLast) log += to_host ? '>' : '<';
        });
        tessera_stand_in_on_wait([] {
          if (!log.empty() && log.back() != 'w') log += 'w';
        });
      };
      if (row.early) listen();
      loss.backward();
      if (!row.early) listen();
      engine.step();
      tessera_stand_in_on_copy(nullptr);
      tessera_stand_in_on_wait(nullptr);
    }
    EXPECT_EQ(log, row.expected);
    EXPECT_NEAR(static_cast<double>(tessera_stand_in_bytes() - before), row.bytes * kSize, 0.01 * kSize);
  }
}

// Units that stay are given to the device before the host turns to those that are away.
TEST(DeviceTiles, WhatStaysIsUpdatedFirst) {
  static std::vector<int64_t> launched;  // updates, where the host waits
  static int64_t before = 0;
  constexpr int kUnits = 4;
  std::vector<engine::ParamSpec> specs;
  for (int i = 0; i < kUnits; ++i) {
    const std::string name = "w" + std::to_string(i);
    specs.push_back({name, at::ones({1000}, kAccelerator).requires_grad_(true), 0, "u" + name});
  }
  engine::Options options = toy_options({.stage = 1, .precision = PrecisionPolicy::fp32()});
  options.zero.home = offload::state_homes({.residence = shard::Residence::Host});
  options.zero.ratio = 0.5;
  Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
  for (int step = 0; step < 2; ++step) {
    at::Tensor loss = at::zeros({}, kAccelerator);
    for (const auto& spec : specs)
      loss = loss + spec.tensor.square().sum();
    loss.backward();
    launched.clear();
    before = tessera_stand_in_launches_of("adam");
    tessera_stand_in_on_wait([] { launched.push_back(tessera_stand_in_launches_of("adam") - before); });
    engine.step();
    tessera_stand_in_on_wait(nullptr);
  }
  EXPECT_EQ(std::ranges::count(launched, 1), 0);
  EXPECT_GE(std::ranges::count(launched, kUnits / 2), 2) << "a wait for each tile of the host";
}

// In the backward the host updates a unit once the next one is on its way: it waits for a copy that the device is past.
TEST(DeviceTiles, TheHostUpdatesAUnitWhileTheNextOneComes) {
  // The number of a unit whose gradient is computed, '>' a copy to the host, '<' one back, 'w' the host waits.
  static std::string log;
  constexpr int64_t kSize = 1 << 16, kUnits = 4;
  PrecisionPolicy precision = PrecisionPolicy::bf16();
  precision.skip_nonfinite = false;
  std::vector<engine::ParamSpec> specs;
  for (int i = 0; i < kUnits; ++i) {
    const std::string number = std::to_string(i);
    specs.push_back({"w" + number, at::ones({kSize}, kAccelerator).requires_grad_(true), 0, "u" + number});
  }
  engine::Options options = toy_options({.stage = 2, .clip = 0, .precision = precision, .in_backward = true});
  options.zero.home = offload::state_homes({.residence = shard::Residence::Host, .pin_memory = true});
  Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
  for (int step = 0; step < 2; ++step) {
    at::Tensor x = at::ones({}, kAccelerator);
    for (int i = 0; i < kUnits; ++i) {
      x = x + specs[i].tensor.to(at::kFloat).sum();
      x.register_hook([i](const at::Tensor& grad) {
        log += std::to_string(i);
        return grad;
      });
    }
    log.clear();
    tessera_stand_in_on_copy([](bool to_host, int64_t bytes) {
      if (bytes >= 2 * kSize) log += to_host ? '>' : '<';
    });
    tessera_stand_in_on_wait([] {
      if (log.back() != 'w') log += 'w';
    });
    x.backward();
    tessera_stand_in_on_copy(nullptr);
    tessera_stand_in_on_wait(nullptr);
    engine.step();
  }
  EXPECT_EQ(log, "3>>2>>w<1>>w<0>>w<w<");
  EXPECT_STREQ(tessera_stand_in_races(), "");
}

}  // namespace tessera::testing

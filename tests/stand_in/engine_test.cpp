// Engines whose model is on a device: what they compute there has the bits of the CPU, in every mode, stage and world.
// The host cannot read the device's memory, so code that tries crashes here.
#include "tessera/engine/engine.h"

#include <gtest/gtest.h>

#include "tessera/offload/states.h"
#include "tests/io/temp_folder.h"
#include "tests/stand_in/staged_group.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"
#include "tests/support/training.h"

namespace tessera::testing {

using amp::PrecisionPolicy;
using engine::Engine;
using engine::Quantity;

namespace {

c10::Device device_of(int rank) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(rank)};
}

Toy toy_on(c10::Device device) {
  Toy toy;
  for (at::Tensor& t : toy.tensors)
    t = t.detach().to(device).requires_grad_(true);
  return toy;
}

struct Training {
  bool on_device;
  ToyRun run;
  int world;
  optim::Rule rule = optim::Rule::Adam;
  // Where they live on a device.
  offload::StateOptions states = {.residence = shard::Residence::Device};
  offload::StateOptions weights = {.residence = shard::Residence::Device};
};

ToyTrained train(const Training& t) {
  ToyTrained trained;
  run_ranks(t.world, [&](int rank, comm::GroupPtr group) {
    const c10::Device device = t.on_device ? device_of(rank) : c10::Device(at::kCPU);
    if (t.on_device) group = std::make_shared<StagedGroup>(group);
    const Toy toy = toy_on(device);
    engine::Options options = toy_options(t.run);
    options.rule = t.rule;
    if (t.on_device) options.zero.home = offload::state_homes(t.states);
    if (t.on_device) options.zero.weight_home = offload::state_homes(t.weights);
    options.time_device = t.run.stage % 2 == 1;  // phases that wait for the device change no result
    optim::GroupOptions params = toy_adamw();
    if (t.rule == optim::Rule::Sgd) params.momentum = 0.9;
    Engine engine(options, comm::Mesh(group), toy.specs(), {params});
    const auto batch = [&](int of, int number) { return toy_batch(of, number).to(device); };
    const int moments = t.rule == optim::Rule::Adam ? 2 : 1;
    ToyTrained mine = train_toy(engine, toy, rank, {.batch = batch, .moments = moments});
    for (at::Tensor& value : mine.states) {
      EXPECT_EQ(value.device(), device);
      value = value.cpu();
    }
    if (rank == 0) trained = std::move(mine);
  });
  return trained;
}

void expect_the_cpus_bits(Training t, const std::string& what) {
  t.on_device = false;
  const ToyTrained expected = train(t);
  t.on_device = true;
  const int64_t before = tessera_stand_in_launches();
  const ToyTrained got = train(t);
  EXPECT_GT(tessera_stand_in_launches(), before) << what;
  expect_same(got, expected, what);
}

TEST(DeviceEngine, HasTheBitsOfTheCpu) {
  const std::vector<PrecisionPolicy> modes = all_modes();
  for (size_t number = 0; number < modes.size(); ++number) {
    for (const int world : {1, 2, 4}) {
      for (int stage = 0; stage <= 3; ++stage) {
        const ToyRun run{.stage = stage, .accumulation = 2, .clip = 0.5, .precision = modes[number]};
        expect_the_cpus_bits(
            {.on_device = true, .run = run, .world = world},
            "mode " + std::to_string(number) + ", stage " + std::to_string(stage) + ", world " + std::to_string(world));
      }
    }
  }
}

TEST(DeviceEngine, AllRules) {
  for (const auto rule : {optim::Rule::Sgd, optim::Rule::Lion, optim::Rule::Adagrad}) {
    const ToyRun run{.stage = 1, .clip = 0, .precision = PrecisionPolicy::bf16()};
    expect_the_cpus_bits({.on_device = true, .run = run, .world = 2, .rule = rule},
                         "rule " + std::to_string(static_cast<int>(rule)));
  }
}

// States in host memory and on a disk, where the host updates them; weights there, with states on the device or not.
TEST(DeviceEngine, HasTheBitsOfTheCpuWhereverStatesLive) {
  const io::TempFolder folder;
  const std::vector<PrecisionPolicy> modes = all_modes();
  for (size_t number = 0; number < modes.size(); ++number) {
    for (const int world : {1, 2}) {
      for (int stage = 1; stage <= 3; ++stage) {
        for (const auto residence : {shard::Residence::Host, shard::Residence::Nvme}) {
          const ToyRun run{.stage = stage, .accumulation = 2, .clip = 0.5, .precision = modes[number]};
          Training training{.on_device = true, .run = run, .world = world};
          const offload::StateOptions away{.residence = residence, .folder = folder.path(), .pin_memory = true};
          const std::string what = "mode " + std::to_string(number) + ", stage " + std::to_string(stage) + ", world " +
                                   std::to_string(world) + ", residence " + std::to_string(static_cast<int>(residence));
          training.states = away;
          expect_the_cpus_bits(training, what);
          if (stage < 3) continue;
          training.weights = away;
          expect_the_cpus_bits(training, what + ", weights too");
          training.states = {.residence = shard::Residence::Device};
          expect_the_cpus_bits(training, what + ", only weights");
        }
      }
    }
  }
}

// What the device holds is weights and a bucket. Tile k + 1 is on its way to the host before tile k is updated and sent back.
TEST(DeviceEngine, TilesPassThroughTheHost) {
  static std::vector<std::pair<bool, int64_t>> copies;  // to the host; elements. Smaller ones are those of the norm
  constexpr int64_t kTile = shard::kTile, kLast = 1 << 16, kSize = 2 * kTile + kLast;
  for (const auto residence : {shard::Residence::Host, shard::Residence::Nvme}) {
    const io::TempFolder folder;
    const int64_t before = tessera_stand_in_bytes();
    at::Tensor weight = at::zeros({kSize}, device_of(0)).requires_grad_(true);
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
    EXPECT_NEAR(static_cast<double>(tessera_stand_in_bytes() - before), 8.0 * kSize, 0.01 * kSize);
  }
}

// Each gradient is copied while the next one is computed, and two buckets serve all of them: the device's memory is weights
// and these, whatever the stage, also where a step has several backwards.
TEST(DeviceEngine, GradientsLeaveWhileTheBackwardGoesOn) {
  static std::string log;  // the number of a unit whose gradient is computed, '>' a copy to the host, '<' one back
  static int64_t most = 0;
  constexpr int64_t kSize = 1 << 18, kUnits = 8, kUnit = 4 * 2 * kSize;
  for (int stage = 1; stage <= 3; ++stage) {
    for (const auto residence : {shard::Residence::Host, shard::Residence::Nvme}) {
      const io::TempFolder folder;
      const int64_t before = tessera_stand_in_bytes();
      std::vector<engine::ParamSpec> specs;
      for (int i = 0; i < kUnits; ++i)
        for (const std::string name : {"a", "b"})
          specs.push_back({name + std::to_string(i), at::ones({kSize}, device_of(0)).requires_grad_(true), 0,
                           "u" + std::to_string(i)});
      engine::Options options = toy_options({.stage = stage, .min_unit = 1, .precision = PrecisionPolicy::fp32()});
      options.zero.home = offload::state_homes({.residence = residence, .folder = folder.path()});
      Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
      const auto backward = [&] {
        log.clear();
        most = 0;
        at::Tensor x = at::ones({}, device_of(0));
        for (int i = 0; i < kUnits; ++i) {
          x = x + specs[2 * i].tensor.sum() + specs[2 * i + 1].tensor.sum();
          x.register_hook([i](const at::Tensor& grad) {
            log += std::to_string(i);
            most = std::max(most, tessera_stand_in_bytes());
            return grad;
          });
        }
        tessera_stand_in_on_copy([](bool to_host, int64_t bytes) {
          if (bytes == kUnit) log += to_host ? '>' : '<';
        });
        x.backward();
      };
      EXPECT_NEAR(static_cast<double>(tessera_stand_in_bytes() - before), kUnits * kUnit, 0.1 * kUnit) << "weights";
      backward();
      EXPECT_EQ(log, "7>6>5>4>3>2>1>0>") << "stage " << stage;
      EXPECT_LT(most - before, (kUnits + 2.6) * kUnit) << "and a gradient of torch's";
      if (stage > 1) {  // else they add up on the device until the step
        backward();
        EXPECT_EQ(std::count(log.begin(), log.end(), '<'), kUnits) << log;
        EXPECT_LT(most - before, (kUnits + 2.6) * kUnit);
      }
      tessera_stand_in_on_copy(nullptr);
      const at::Tensor sum = engine.states().get_full(3, Quantity::Gradient);
      EXPECT_TRUE(sum.cpu().eq(stage > 1 ? 2 : 1).all().item<bool>());
      EXPECT_EQ(sum.device(), device_of(0));
      engine.step();
      EXPECT_NEAR(static_cast<double>(tessera_stand_in_bytes() - before), (kUnits + 2) * kUnit + 4 * kSize,
                  0.1 * kUnit);
    }
  }
}

// The device's memory is one gathered unit of eight and the bucket of the next; moved away it is nothing.
TEST(DeviceEngine, WeightsElsewhereLeaveTheDevice) {
  constexpr int64_t kSize = 1 << 20, kUnits = 8;
  for (const bool weights : {true, false}) {
    const int64_t before = tessera_stand_in_bytes();
    std::vector<engine::ParamSpec> specs;
    for (int i = 0; i < kUnits; ++i)
      specs.push_back(
          {"w" + std::to_string(i), at::ones({kSize}, device_of(0)).requires_grad_(true), 0, "u" + std::to_string(i)});
    engine::Options options = toy_options({.stage = 3, .precision = PrecisionPolicy::fp32()});
    const offload::StateOptions host{.residence = shard::Residence::Host, .pin_memory = true};
    options.zero.home = offload::state_homes(host);
    if (weights) options.zero.weight_home = offload::state_homes(host);
    Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
    const auto held = [&] { return static_cast<double>(tessera_stand_in_bytes() - before) / (4.0 * kSize); };
    EXPECT_NEAR(held(), weights ? 0 : kUnits, 0.1) << "weights where they live here";
    if (!weights) {
      engine.offload_states({zero::StateKind::Weights, zero::StateKind::Gradients});
      EXPECT_NEAR(held(), 0, 0.1);
      EXPECT_EQ(engine.memory().host, 16 * kSize * kUnits);
      engine.reload_states();
      EXPECT_NEAR(held(), kUnits, 0.1);
      EXPECT_TRUE(specs[3].tensor.cpu().eq(1).all().item<bool>());
    }
  }
}

TEST(DeviceEngine, AFailedLaunchIsAnErrorOfTheStep) {
  const Toy toy = toy_on(device_of(0));
  Engine engine = toy_engine({.stage = 2}, toy, comm::single_group());
  toy_forward(engine, toy, toy_batch(0, 0).to(device_of(0))).backward();
  tessera_stand_in_fail_next_launch();
  EXPECT_THROW(engine.step(), std::runtime_error);
}

TEST(DeviceEngine, ParametersOnTwoDevicesAreRefused) {
  Toy toy = toy_on(device_of(0));
  toy.tensors[1] = toy.tensors[1].detach().cpu().requires_grad_(true);
  const auto text = error_of([&] { toy_engine({.stage = 2}, toy, comm::single_group()); });
  EXPECT_HAS(text, "parameter 'b' is on device 'cpu', parameter 'a' on 'privateuseone:0'");
}

}  // namespace
}  // namespace tessera::testing

// Host and device share an update of states that live elsewhere: bits, order, memory, and what finds the shares.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/engine.h"
#include "tessera/offload/states.h"
#include "tests/io/temp_folder.h"
#include "tests/stand_in/staged_group.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/training.h"

namespace tessera::testing {

using amp::PrecisionPolicy;
using engine::Engine;
using engine::UpdatedBy;
using shard::Residence;

namespace {

c10::Device share_device(int rank) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(rank)};
}

struct ShareRow {
  ToyRun run;
  int world = 1;
  Residence states = Residence::Host;
  bool weights = false;  // live there too
  double share = 0, ratio = 1;
  bool pin = true;
  std::string name() const {
    return c10::str("stage ", run.stage, ", world ", world, ", ", run.precision->bytes_per_parameter(),
                    " bytes, accumulation ", run.accumulation, run.in_backward ? ", in the backward" : "",
                    run.runs_on ? ", running on" : "", ", residence ", int(states), weights ? ", weights too" : "",
                    ", share ", share, ", ratio ", ratio, pin ? "" : ", not page-locked");
  }
};

offload::StateOptions share_home(Residence residence, const std::string& folder, bool pin) {
  return {.residence = residence, .folder = folder, .pin_asked = pin};
}

// `by`: who updated units of rank 0.
ToyTrained train_share(const ShareRow& row, const std::string& folder, std::set<UpdatedBy>* by) {
  ToyTrained trained;
  run_ranks(row.world, [&](int rank, const comm::GroupPtr& below) {
    const bool there = by != nullptr;
    Toy toy;
    if (there)
      for (at::Tensor& t : toy.tensors)
        t = t.detach().to(share_device(rank)).requires_grad_(true);
    engine::Options options = toy_options(row.run);
    if (there) {
      options.zero.home = offload::state_homes(share_home(row.states, folder, row.pin));
      options.zero.pin_memory = row.pin;
      options.zero.device_share = row.share;
      options.zero.ratio = row.ratio;
      if (row.weights)
        options.zero.weight_home =
            offload::state_homes({.residence = row.states, .folder = folder, .pin_memory = row.pin});
    }
    const comm::GroupPtr group = there ? std::make_shared<StagedGroup>(below) : below;
    Engine engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()});
    ToyTrained mine =
        train_toy(engine, toy, rank,
                  {.batch = [&](int of, int number) { return toy_batch(of, number).to(toy.tensors[0].device()); }});
    for (at::Tensor& value : mine.states)
      value = value.cpu();
    if (rank != 0) return;
    trained = std::move(mine);
    if (!there) return;
    for (const auto& unit : engine.offload_plan().units)
      by->insert(unit.by);
  });
  return trained;
}

// Updated by the host, by the device, or by both at once.
void expect_share_has_the_bits(const ShareRow& row, const ToyTrained& expected, const std::string& folder) {
  std::set<UpdatedBy> by;
  expect_same(train_share(row, folder, &by), expected, row.name());
  std::set<UpdatedBy> wanted;
  if (row.share > 0) wanted.insert(UpdatedBy::Through);
  if (row.share < 1) wanted.insert(UpdatedBy::Host);
  if (row.ratio < 1) wanted.insert(UpdatedBy::Device);
  EXPECT_EQ(by, wanted) << row.name();
  EXPECT_STREQ(tessera_stand_in_races(), "") << row.name();
}

std::vector<engine::ParamSpec> share_units(int count, int64_t size, at::ScalarType dtype = at::kFloat) {
  std::vector<engine::ParamSpec> specs;
  for (int i = 0; i < count; ++i) {
    const std::string number = std::to_string(i);
    const at::Tensor values = at::ones({size}, at::TensorOptions(share_device(0)).dtype(dtype));
    specs.push_back({"w" + number, values.requires_grad_(true), 0, "u" + number});
  }
  return specs;
}

void share_backward(const std::vector<engine::ParamSpec>& specs) {
  at::Tensor loss = at::zeros({}, share_device(0));
  for (const auto& spec : specs)
    loss = loss + spec.tensor.sum();
  loss.backward();
}

std::string order_of(const Engine& engine) {
  std::string order;
  for (const auto& unit : engine.offload_plan().units)
    order += unit.by == UpdatedBy::Host ? 'h' : unit.by == UpdatedBy::Through ? 't' : 'd';
  return order;
}

}  // namespace

TEST(DeviceShare, HasTheBitsOfTheCpuWhateverTheShare) {
  const io::TempFolder folder;
  const auto modes = all_modes();
  for (const size_t mode : {0, 1, 2, 3, 7}) {  // states of 32 bits
    for (const int world : {1, 2}) {
      for (int stage = 1; stage <= 3; ++stage) {
        for (const auto& [accumulation, early] : {std::pair(1, false), std::pair(2, false), std::pair(1, true)}) {
          ToyRun run{.stage = stage,
                     .accumulation = accumulation,
                     .clip = early ? 0 : 0.5,
                     .min_unit = 1,
                     .persistence = 0,
                     .precision = modes[mode],
                     .in_backward = early};
          if (early) run.precision->skip_nonfinite = false;
          if (early && run.precision->param == at::kHalf) continue;
          const ToyTrained expected = train_share({.run = run, .world = world}, "", nullptr);
          for (const auto states : {Residence::Host, Residence::Nvme}) {
            for (const double share : {0.0, 0.5, 1.0}) {
              const ShareRow row{.run = run, .world = world, .states = states, .share = share};
              expect_share_has_the_bits(row, expected, folder.path());
              if (share != 0.5) continue;
              ShareRow other = row;
              other.run.runs_on = true;
              if (early) expect_share_has_the_bits(other, expected, folder.path());
              other.ratio = 0.9;
              if (mode == 2) expect_share_has_the_bits(other, expected, folder.path());
              other.pin = false;
              if (mode == 2) expect_share_has_the_bits(other, expected, folder.path());
              other = row;
              other.weights = true;
              if (stage == 3) expect_share_has_the_bits(other, expected, folder.path());
            }
          }
        }
      }
    }
  }
}

// The device has work for as long as the host takes for its next unit, and the host waits for its own tiles only.
TEST(DeviceShare, BothGoOnAtTheSameTime) {
  // '<' and '>': a unit's copy to the device and to the host, 'u' the device updates one, 'w' the host waits.
  static std::string log;
  static int64_t updates = 0;
  const auto note_updates = [] {
    for (const int64_t now = tessera_stand_in_launches_of("adam"); updates < now; ++updates)
      log += 'u';
  };
  static void (*const note)() = note_updates;
  constexpr int64_t kSize = 1 << 16;
  struct Shared {
    double share;
    std::string order;
  };
  for (const Shared& row : {Shared{0, "hhhhhhhh"}, Shared{.25, "thhhthhh"}, Shared{.5, "thththth"},
                            Shared{.75, "ttthttth"}, Shared{1, "tttttttt"}}) {
    const auto specs = share_units(8, kSize);
    engine::Options options = toy_options({.stage = 1, .precision = PrecisionPolicy::bf16()});
    options.zero.home = offload::state_homes(share_home(Residence::Host, "", true));
    options.zero.device_share = row.share;
    Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
    EXPECT_EQ(order_of(engine), row.order);
    int64_t bytes = 0, pinned = 0;
    for (int step = 0; step < 3; ++step) {
      share_backward(specs);
      log.clear();
      updates = tessera_stand_in_launches_of("adam");
      tessera_stand_in_on_wait([] {
        note();
        if (log.empty() || log.back() != 'w') log += 'w';
      });
      engine.step();
      tessera_stand_in_on_wait(nullptr);
      note();
      if (step == 1) bytes = tessera_stand_in_bytes(), pinned = tessera_stand_in_pinned_bytes();
    }
    EXPECT_EQ(tessera_stand_in_bytes(), bytes) << "nothing is allocated in a step";
    EXPECT_EQ(tessera_stand_in_pinned_bytes(), pinned);
    // The device is given its units, then the host waits for a tile of its own.
    std::string expected = "w";
    for (const char who : row.order)
      if (who == 't' || expected.back() != 'w') expected += who == 't' ? 'u' : 'w';
    EXPECT_EQ(log, expected) << row.share;
  }
  EXPECT_STREQ(tessera_stand_in_races(), "");
}

// What passes through the device is page-locked, and its gradients stay on the device for the update.
TEST(DeviceShare, MemoryFollowsTheShare) {
  constexpr int64_t kSize = 1 << 20, kUnits = 8;
  for (const double share : {0.0, 0.5, 1.0}) {
    for (const int accumulation : {1, 2}) {
      const int64_t before = tessera_stand_in_bytes();
      const auto specs = share_units(kUnits, kSize, at::kBFloat16);
      engine::Options options =
          toy_options({.stage = 2, .accumulation = accumulation, .precision = PrecisionPolicy::bf16()});
      options.zero.home = offload::state_homes(share_home(Residence::Host, "", true));
      options.zero.device_share = share;
      Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
      constexpr double kAll = kUnits * kSize;
      EXPECT_NEAR(static_cast<double>(tessera_stand_in_bytes() - before), 2 * kAll, .02 * kAll) << "weights";
      const double leaves = accumulation > 1 ? 1 : 1 - share;
      EXPECT_EQ(engine.memory().host, static_cast<int64_t>((10 + 2 * leaves) * kAll));
      share_backward(specs);
      EXPECT_NEAR(static_cast<double>(engine.memory().grads), 2 * kAll, .02 * kAll);
      EXPECT_NEAR(static_cast<double>(engine.memory().host), (10 + 2 * leaves) * kAll, .02 * kAll);
    }
  }
}

TEST(DeviceShare, IsFoundFromWhatIsMeasured) {
  const io::TempFolder folder;
  for (const auto states : {Residence::Host, Residence::Nvme}) {
    for (const int world : {1, 2}) {
      std::map<int, engine::OffloadPlan> plans;
      std::mutex mutex;
      run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
        const bool disk = states == Residence::Nvme;
        Toy toy;
        for (at::Tensor& t : toy.tensors)
          t = t.detach().to(share_device(rank)).requires_grad_(true);
        engine::Options options = toy_options({.stage = 2, .min_unit = 1, .precision = PrecisionPolicy::bf16()});
        options.zero.home = offload::state_homes(share_home(states, folder.path(), true));
        options.offload = {.finds_share = true, .folder = disk ? folder.path() : ""};
        Engine engine(options, comm::Mesh(std::make_shared<StagedGroup>(group)), toy.specs(), {toy_adamw()});
        const std::lock_guard lock(mutex);
        plans[rank] = engine.offload_plan();
      });
      const engine::OffloadPlan& plan = plans[0];
      ASSERT_TRUE(plan.rates);
      for (const double rate : {plan.rates->bus, plan.rates->host, plan.rates->memory, plan.rates->device})
        EXPECT_GT(rate, 1e6);
      EXPECT_EQ(plan.rates->disk > 0, states == Residence::Nvme);
      EXPECT_GE(plan.device_share, 0);
      EXPECT_LE(plan.device_share, 1);
      EXPECT_DOUBLE_EQ(plan.milliseconds, std::max({plan.bus, plan.host, plan.memory, plan.device, plan.disk}));
      EXPECT_GT(plan.milliseconds, 0);
      EXPECT_HAS(plan.text(), "predicted for an update");
      EXPECT_DOUBLE_EQ(plan.step(3, 5, 2), 16 + plan.milliseconds);
      for (const auto& [rank, other] : plans) {
        EXPECT_EQ(other.device_share, plan.device_share) << "the same on all ranks";
        EXPECT_EQ(other.rates->bus, plan.rates->bus);
        ASSERT_EQ(other.units.size(), plan.units.size());
        for (size_t i = 0; i < plan.units.size(); ++i)
          EXPECT_TRUE(other.units[i].unit == plan.units[i].unit && other.units[i].by == plan.units[i].by);
      }
    }
  }
  EXPECT_STREQ(tessera_stand_in_races(), "");
}

// Whoever asks is told what is measured, in every mode, on a disk, and of a model on the CPU.
TEST(DeviceShare, IsPredictedForWhoAsks) {
  const io::TempFolder folder;
  for (const PrecisionPolicy& precision : all_modes()) {
    for (const auto residence : {Residence::Host, Residence::Nvme}) {
      for (const bool cpu : {false, true}) {
        if (cpu && residence == Residence::Host) continue;  // they live there anyway
        run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
          Toy toy;
          if (!cpu)
            for (at::Tensor& t : toy.tensors)
              t = t.detach().to(share_device(rank)).requires_grad_(true);
          engine::Options options = toy_options({.stage = 2, .min_unit = 1, .precision = precision, .runs_on = true});
          options.zero.home = offload::state_homes(share_home(residence, folder.path(), true));
          if (residence == Residence::Nvme) options.offload.folder = folder.path();
          Engine engine(options, comm::Mesh(cpu ? group : std::make_shared<StagedGroup>(group)), toy.specs(),
                        {toy_adamw()});
          EXPECT_FALSE(engine.offload_plan().rates);
          EXPECT_HAS(error_of([&] { (void)engine.offload_plan().step(1, 2); }), "measure");
          engine.measure_offload();
          const engine::OffloadPlan plan = engine.offload_plan();
          ASSERT_TRUE(plan.rates);
          EXPECT_EQ(plan.rates->bus > 0, !cpu);
          EXPECT_EQ(plan.bus > 0, !cpu);
          EXPECT_EQ(plan.rates->device > 0, !cpu);
          EXPECT_EQ(plan.device > 0, !cpu && precision.states_are_narrow());
          EXPECT_EQ(plan.disk > 0, residence == Residence::Nvme);
          EXPECT_GT(plan.milliseconds, 0);
          EXPECT_HAS(error_of([&] { (void)plan.step(-1, 2); }), "forward is -1");
          EXPECT_HAS(error_of([&] { (void)plan.step(1, 2, 0); }), "micro_batches 0");
          EXPECT_DOUBLE_EQ(plan.step(0, 5), 5 + plan.milliseconds);
          EXPECT_DOUBLE_EQ(plan.step(1e9, 5), 5 + 1e9) << "it runs on beside the forward";
          EXPECT_EQ(engine.offload_plan().rates->host, plan.rates->host) << "from then on";
        });
      }
    }
  }
}

// Of states of 16 bits, of a model on the CPU and of states that stay nothing is measured.
TEST(DeviceShare, IsNotMeasuredWhereThereIsNothingToFind) {
  const auto plan_of = [](const PrecisionPolicy& precision, c10::Device device, bool away) {
    Toy toy;
    for (at::Tensor& t : toy.tensors)
      t = t.detach().to(device).requires_grad_(true);
    engine::Options options = toy_options({.stage = 2, .precision = precision});
    if (away) options.zero.home = offload::state_homes({.residence = Residence::Host});
    options.offload = {.finds_ratio = device.is_cpu(), .finds_share = true};
    return Engine(options, comm::Mesh(), toy.specs(), {toy_adamw()}).offload_plan();
  };
  const PrecisionPolicy narrow = mode(at::kBFloat16, amp::Master::Weight, at::kBFloat16);
  EXPECT_FALSE(plan_of(narrow, share_device(0), true).rates);
  EXPECT_FALSE(plan_of(PrecisionPolicy::bf16(), at::kCPU, true).rates);
  EXPECT_FALSE(plan_of(PrecisionPolicy::bf16(), share_device(0), false).rates);
  EXPECT_EQ(plan_of(narrow, share_device(0), true).units.at(0).by, UpdatedBy::Through);
}

// As many units stay as the device has room for, and the training that follows fits.
TEST(DeviceShare, WhatDoesNotFitIsAway) {
  constexpr int64_t kSize = 1 << 20, kUnits = 16;
  constexpr double kAll = kUnits * kSize;
  for (const int stage : {1, 2, 3}) {
    double last = -1;
    for (const double room : {40.0, 14.0, 10.0, 3.0}) {  // bytes an element
      const int64_t before = tessera_stand_in_bytes();
      tessera_stand_in_set_capacity(before + static_cast<int64_t>(room * kAll));
      {
        const auto specs = share_units(kUnits, kSize, at::kBFloat16);
        engine::Options options = toy_options({.stage = stage, .precision = PrecisionPolicy::bf16()});
        options.zero.home = offload::state_homes(share_home(Residence::Host, "", true));
        options.offload = {.finds_ratio = true, .reserve = 0.1};
        Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
        const engine::OffloadPlan plan = engine.offload_plan();
        EXPECT_GE(plan.ratio, last) << "less room, more is away";
        last = plan.ratio;
        const std::string order = order_of(engine);
        const bool some = order.front() == 'd' && order.back() == 'h';
        EXPECT_TRUE(room == 40  ? order == std::string(kUnits, 'd')
                    : room == 3 ? order == std::string(kUnits, 'h')
                                : room != 10 || some)
            << order;
        for (int step = 0; step < 2; ++step) {
          share_backward(specs);
          engine.step();
        }
        const double held = static_cast<double>(tessera_stand_in_bytes() - before);
        EXPECT_LE(held, .9 * room * kAll) << "the reserve is free";
      }
      tessera_stand_in_set_capacity(int64_t{1} << 50);
    }
  }
}

TEST(DeviceShare, ARatioOfAModelOnTheCpuIsANumber) {
  const io::TempFolder folder;
  const Toy toy;
  engine::Options options = toy_options({.stage = 1});
  options.zero.home = offload::state_homes(share_home(Residence::Nvme, folder.path(), true));
  options.offload = {.finds_ratio = true, .folder = folder.path()};
  EXPECT_HAS(error_of([&] { Engine(options, comm::Mesh(), toy.specs(), {toy_adamw()}); }), "give a number");
}

}  // namespace tessera::testing

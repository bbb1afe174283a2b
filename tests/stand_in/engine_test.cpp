// Engines whose model is on a device: what they compute there has the bits of the CPU, in every mode, stage and world.
// The host cannot read the device's memory, so code that tries crashes here.
#include "tessera/engine/engine.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tessera/engine/checkpoint.h"
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
  toy.enclosed = true;
  for (at::Tensor& t : toy.tensors)
    t = t.detach().to(device).requires_grad_(true);
  return toy;
}

// The streams of the user's under which micro-batches and steps run.
enum class Under { Default, One, Turns, StepElsewhere };

struct Training {
  bool on_device;
  ToyRun run;
  int world;
  optim::Rule rule = optim::Rule::Adam;
  // Where they live on a device.
  offload::StateOptions states = {.residence = shard::Residence::Device};
  offload::StateOptions weights = {.residence = shard::Residence::Device};
  Under under = Under::Default;
};

// Changes the thread's current stream as Training::under says. The user's part is that a step is over where the next forward
// runs.
class UserStreams {
 public:
  UserStreams(const Training& t, c10::Device device) : under_(device.is_cpu() ? Under::Default : t.under) {
    if (under_ == Under::Default) return;
    guard_.emplace(device.type());
    steps_ = t.run.accumulation;
    stepped_ = guard_->getDefaultStream(device);
    for (int i = 0; i < 2; ++i)
      streams_.push_back(guard_->getStreamFromGlobalPool(device));
  }
  void begin(int micro_batch) {
    events_ = 0;
    if (under_ == Under::Default) return;
    const c10::Stream next = streams_[under_ == Under::Turns ? micro_batch % 2 : 0];
    if (micro_batch % steps_ == 0) {
      c10::Event step(next.device_type());
      step.record(*stepped_);
      step.block(next);
    }
    guard_->exchangeStream(next);
  }
  void between() {
    if (under_ == Under::Default) return;
    ++events_;
    const c10::Stream now = guard_->getStream(streams_[0].device());
    if (events_ == 2 && under_ == Under::StepElsewhere) guard_->exchangeStream(guard_->getDefaultStream(now.device()));
    if (events_ == 3) stepped_ = guard_->getStream(now.device());
  }

 private:
  Under under_;
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::vector<c10::Stream> streams_;
  std::optional<c10::Stream> stepped_;
  int steps_ = 1, events_ = 0;
};

// What a rank of the training has; `group` is that of the ranks on the CPU.
c10::Device device_for(const Training& t, int rank) {
  return t.on_device ? device_of(rank) : c10::Device(at::kCPU);
}

Engine engine_for(const Training& t, const Toy& toy, comm::GroupPtr group) {
  if (t.on_device) group = std::make_shared<StagedGroup>(group);
  engine::Options options = toy_options(t.run);
  options.rule = t.rule;
  if (t.on_device) options.zero.home = offload::state_homes(t.states);
  if (t.on_device) options.zero.weight_home = offload::state_homes(t.weights);
  // Phases that wait for the device change no result. They would hide what is not ordered.
  options.time_device = t.run.stage % 2 == 1 && t.under == Under::Default;
  optim::GroupOptions params = toy_adamw();
  if (t.rule == optim::Rule::Sgd) params.momentum = 0.9;
  return {options, comm::Mesh(group), toy.specs(), {params}};
}

ToyTrained train(const Training& t, ToyTraining how = {}) {
  ToyTrained trained;
  how.moments = t.rule == optim::Rule::Adam ? 2 : 1;
  run_ranks(t.world, [&](int rank, const comm::GroupPtr& group) {
    const c10::Device device = device_for(t, rank);
    const Toy toy = toy_on(device);
    Engine engine = engine_for(t, toy, group);
    UserStreams streams(t, device);
    ToyTraining mine = how;
    mine.batch = [&](int of, int number) {
      streams.begin(number);
      return how.batch(of, number).to(device);
    };
    mine.between = [&] { streams.between(); };
    ToyTrained found = train_toy(engine, toy, rank, mine);
    for (at::Tensor& value : found.states) {
      EXPECT_EQ(value.device(), device);
      value = value.cpu();
    }
    if (rank == 0) trained = std::move(found);
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

// Two units of which each has columns of a matrix, whose random bits are those of its elements there, and two groups.
std::vector<at::Tensor> train_columns(const PrecisionPolicy& mode, int stage, c10::Device device) {
  std::vector<engine::ParamSpec> specs;
  const auto add = [&](const std::string& unit, const char* name, at::IntArrayRef shape, int group) {
    const at::Tensor values = at::linspace(-1, 1, c10::multiply_integers(shape)).view(shape);
    specs.push_back({unit + name, values.to(device).requires_grad_(true), group, unit});
  };
  for (const std::string unit : {"x", "y"}) {
    add(unit, "columns", {8, 12}, 0);
    specs.back().cut = shard::cut_along({8, 30}, 1, {{5, 17}});
    add(unit, "bias", {7}, 1);
    add(unit, "more", {40}, 0);
  }
  optim::GroupOptions other = toy_adamw();
  other.lr *= 3;
  Engine engine(toy_options({.stage = stage, .clip = 0, .persistence = 1 << 20, .precision = mode}), comm::Mesh(),
                specs, {toy_adamw(), other});
  for (int step = 0; step < 3; ++step) {
    at::Tensor loss = at::zeros({}, device);
    for (const auto& spec : specs)
      loss = loss + spec.tensor.to(at::kFloat).square().sum();
    loss.backward();
    const int64_t updates = tessera_stand_in_launches_of("adam"), sums = tessera_stand_in_launches_of("sum_of_squares");
    engine.step();
    EXPECT_EQ(tessera_stand_in_launches_of("adam") - updates, device.is_cpu() ? 0 : 2);
    EXPECT_EQ(tessera_stand_in_launches_of("sum_of_squares") - sums, device.is_cpu() ? 0 : 2);
  }
  std::vector<at::Tensor> states;
  for (const auto& spec : specs)
    states.push_back(spec.tensor.detach().cpu());
  return states;
}

// An update and its part of the norm are a launch each for each unit.
TEST(DeviceEngine, UpdatesAUnitByOneLaunch) {
  for (const PrecisionPolicy& mode : all_modes()) {
    for (int stage = 0; stage <= 3; ++stage)
      expect_same(train_columns(mode, stage, device_of(0)), train_columns(mode, stage, at::kCPU),
                  "stage " + std::to_string(stage));
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
          Training later = training;
          later.run.runs_on = true;
          expect_the_cpus_bits(later, what + ", running on");
          Training early = training;
          early.run.clip = 0;
          early.run.accumulation = 1;
          early.run.in_backward = true;
          early.run.precision->skip_nonfinite = false;
          expect_the_cpus_bits(early, what + ", update in the backward");
          Training both = early;
          both.run.runs_on = true;
          expect_the_cpus_bits(both, what + ", update in the backward, running on");
          early.run = run;
          early.run.accumulation = 1;
          expect_the_cpus_bits(early, what + ", one micro-batch");
          early.run.runs_on = true;
          expect_the_cpus_bits(early, what + ", one micro-batch, running on");
          if (stage < 3) continue;
          for (Training* t : {&training, &later, &both}) {
            t->states = t->weights = away;
            expect_the_cpus_bits(*t, what + ", weights too");
            t->states = {.residence = shard::Residence::Device};
            expect_the_cpus_bits(*t, what + ", only weights");
          }
        }
      }
    }
  }
}

// Weights in host memory that travel in another dtype come as they are and are cast on the device.
TEST(DeviceEngine, CastsOfWeightsElsewhereDoNotWait) {
  static std::atomic<int> waits;
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    at::Tensor weight = (at::arange(1000) * 0.001).to(device_of(rank)).requires_grad_(true);
    engine::Options options = toy_options({.stage = 3, .precision = PrecisionPolicy::fp32()});
    options.zero.weight_home = offload::state_homes({.residence = shard::Residence::Host, .pin_memory = true});
    engine::ParamSpec spec{"w", weight, 0, ""};
    spec.comm = at::kBFloat16;
    Engine engine(options, comm::Mesh(std::make_shared<StagedGroup>(group)), {spec}, {toy_adamw()});
    const int module = engine.modules().add({0});
    group->barrier("built");
    waits = 0;
    tessera_stand_in_on_wait([] { ++waits; });
    engine.modules().enter(module);
    group->barrier("gathered");
    tessera_stand_in_on_wait(nullptr);
    EXPECT_EQ(waits, 0);
    EXPECT_TRUE(weight.detach().cpu().equal((at::arange(1000) * 0.001).to(at::kBFloat16).to(at::kFloat)));
    engine.modules().leave(module, {});
  });
  EXPECT_STREQ(tessera_stand_in_races(), "");
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
      EXPECT_NEAR(static_cast<double>(tessera_stand_in_bytes() - before), kUnits * kUnit + 4 * kSize, 0.1 * kUnit);
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

// Trains as `from` for three micro-batches, the last of which is half of a step, saves, and goes on in an engine as `to`.
ToyTrained resume(Training from, Training to, bool on_device) {
  const io::TempFolder folder;
  ToyTrained trained;
  from.on_device = to.on_device = on_device;
  const auto go_on = [](Engine& engine, const Toy& toy, int rank, int begin, int end) {
    std::vector<double> losses;
    for (int number = begin; number < end; ++number) {
      const at::Tensor loss = toy_forward(engine, toy, toy_batch(rank, number).to(toy.tensors[0].device()));
      loss.backward();
      engine.step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  run_ranks(from.world, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy = toy_on(device_for(from, rank));
    Engine engine = engine_for(from, toy, group);
    go_on(engine, toy, rank, 0, 3);
    engine.checkpoints().save(folder.path(), {});
  });
  run_ranks(to.world, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy = toy_on(device_for(to, rank));
    Engine engine = engine_for(to, toy, group);
    engine.checkpoints().open(folder.path(), "", {})->apply();
    ToyTrained mine{{}, go_on(engine, toy, rank, 3, 6)};
    for (const at::Tensor& value : all_states(engine))
      mine.states.push_back(value.cpu());
    if (rank == 0) trained = std::move(mine);
  });
  return trained;
}

// Of every mode into the same engine, one of another stage and world, and one of another mode, wherever states live.
TEST(DeviceEngine, CheckpointsLoadAsOnTheCpu) {
  const io::TempFolder folder;
  const std::vector<PrecisionPolicy> modes = all_modes();
  const auto run = [&](size_t mode, int stage) {
    return ToyRun{.stage = stage, .accumulation = 2, .precision = modes[mode % modes.size()]};
  };
  for (size_t number = 0; number < modes.size(); ++number) {
    for (const auto residence : {shard::Residence::Device, shard::Residence::Host, shard::Residence::Nvme}) {
      const offload::StateOptions where{.residence = residence, .folder = folder.path(), .pin_memory = true};
      const int stage =
          residence == shard::Residence::Device ? static_cast<int>(number) % 4 : 1 + static_cast<int>(number) % 3;
      const Training from{.on_device = true, .run = run(number, stage), .world = 2, .states = where, .weights = where};
      const int other = stage % 3 + 1;
      for (const Training& to :
           {Training{.on_device = true, .run = run(number, stage), .world = 2, .states = where, .weights = where},
            Training{.on_device = true, .run = run(number, other), .world = 1, .states = where},
            Training{.on_device = true, .run = run(number + 1, other), .world = 2}}) {
        const std::string what = "mode " + std::to_string(number) + ", stage " + std::to_string(stage) +
                                 ", residence " + std::to_string(static_cast<int>(residence)) + ", to stage " +
                                 std::to_string(to.run.stage) + ", world " + std::to_string(to.world);
        expect_same(resume(from, to, true), resume(from, to, false), what);
      }
    }
  }
}

// Autograd accumulates on the stream under which the engine was built, runs other nodes on those of their forwards, and ends
// a backward on its caller's.
TEST(DeviceEngine, WorksUnderStreamsOfTheUsers) {
  const io::TempFolder folder;
  const std::vector<PrecisionPolicy> modes = all_modes();
  for (const auto under : {Under::One, Under::Turns, Under::StepElsewhere}) {
    for (const int world : {1, 2}) {
      for (int stage = 0; stage <= 3; ++stage) {
        for (const char* where : {"device", "states on the host", "all on the host", "all on a disk"}) {
          const bool weights = where[0] == 'a';
          if (where[0] != 'd' && stage == 0) continue;
          if (weights && stage < 3) continue;
          for (const bool in_backward : {false, true}) {
            if (in_backward && stage == 0) continue;
            const auto home = where == std::string("all on a disk") ? shard::Residence::Nvme : shard::Residence::Host;
            const offload::StateOptions away{.residence = home, .folder = folder.path(), .pin_memory = true};
            for (const size_t mode : {0, 2, 5}) {
              const ToyRun run{.stage = stage,
                               .accumulation = in_backward ? 1 : 2,
                               .clip = in_backward ? 0 : 0.5,
                               .precision = modes[mode],
                               .in_backward = in_backward};
              Training training{.on_device = true, .run = run, .world = world, .under = under};
              if (where[0] != 'd') training.states = away;
              if (weights) training.weights = away;
              const std::string what = "streams " + std::to_string(static_cast<int>(under)) + ", world " +
                                       std::to_string(world) + ", stage " + std::to_string(stage) + ", " + where +
                                       (in_backward ? ", update in the backward" : "") + ", mode " +
                                       std::to_string(mode);
              expect_the_cpus_bits(training, what);
              EXPECT_STREQ(tessera_stand_in_races(), "") << what;
            }
          }
        }
      }
    }
  }
}

// What a user sets may be a tensor of the host, whatever the mode.
TEST(DeviceEngine, ValuesOfTheHostAreTaken) {
  for (const PrecisionPolicy& mode : all_modes()) {
    for (int stage = 0; stage <= 3; ++stage) {
      const Toy toy = toy_on(device_of(0));
      Engine engine = toy_engine({.stage = stage, .precision = mode}, toy, comm::single_group());
      toy_forward(engine, toy, toy_batch(0, 0).to(device_of(0))).backward();
      zero::StateAccess& states = engine.states();
      const at::Tensor value = at::full({5, 3}, 0.75);
      for (const auto what : {Quantity::Master, Quantity::State0, Quantity::State1, Quantity::Gradient}) {
        states.set_full(4, what, value);
        EXPECT_TRUE(states.get_full(4, what).cpu().equal(value));
        states.set_local(4, what, (value + 1).flatten());
        EXPECT_TRUE(states.get_full(4, what).cpu().equal(value + 1));
      }
      EXPECT_TRUE(states.gather_full(4, value.flatten()).cpu().equal(value));
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

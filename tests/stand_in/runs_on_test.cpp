// Updates that run on after step(), and those that begin in the backward: what waits for them, what does not, what they hold, and
// what becomes of their errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/engine/checkpoint.h"
#include "tests/io/temp_folder.h"
#include "tests/stand_in/staged_group.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"
#include "tests/support/training.h"

namespace tessera::testing {
namespace {

using engine::Engine;
using engine::Quantity;

// What the update of one unit passes.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    TESSERA_CHECK_IO(!fails, "test", "the disk fails");
    ++came_;
    in_time_ = changed_.wait_for(lock, std::chrono::seconds(30), [&] { return open_; }) && in_time_;
    ++passed_;
  }
  void set(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  int passed() const {
    const std::lock_guard lock(mutex_);
    return passed_;
  }
  // Somebody stands before it.
  bool is_waited_for() const {
    const std::lock_guard lock(mutex_);
    return came_ > passed_;
  }
  bool in_time() const { return in_time_; }
  bool fails = false;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true, in_time_ = true;
  int came_ = 0, passed_ = 0;
};

// Host memory behind a gate.
class GatedHome final : public shard::Home {
 public:
  GatedHome(int64_t size, const at::TensorOptions& options, Gate* gate)
      : values_(at::zeros({size}, options.device(at::kCPU))), gate_(gate) {}
  shard::Residence residence() const override { return shard::Residence::Host; }
  shard::PendingView fetch(shard::Range range) override {
    if (gate_ != nullptr) gate_->pass();
    return shard::PendingView(values_.narrow(0, range.begin, range.size()));
  }
  void store(shard::Range range, const at::Tensor& values) override {
    const at::Tensor there = values_.narrow(0, range.begin, range.size());
    if (!values.is_cpu() || values.const_data_ptr() != there.const_data_ptr()) there.copy_(values);
  }

 private:
  at::Tensor values_;
  Gate* gate_;
};

const std::vector<int64_t> kPartSizes{128, 256, 384};  // of the units, as a forward uses them
constexpr int kParts = 3;

struct Later {
  int stage = 1, world = 1;
  bool weights = false;  // elsewhere, too
  amp::PrecisionPolicy precision = amp::PrecisionPolicy::fp32();
  bool runs_on = true;
  bool early = false;  // it begins in the backward
  std::vector<int64_t> sizes = kPartSizes;
};

std::string what_of(const Later& row) {
  return "stage " + std::to_string(row.stage) + ", world " + std::to_string(row.world) +
         (row.weights ? ", weights elsewhere" : "") + ", " + c10::toString(row.precision.state) + " states" +
         (row.early ? ", in the backward" : "");
}

std::vector<Later> all_later(const std::vector<bool>& when = {false, true}) {
  std::vector<Later> rows;
  for (const bool early : when)
    for (int stage = 1; stage <= 3; ++stage)
      for (const int world : {1, 2})
        for (const size_t mode : {0, 1, 2, 5})
          for (const bool weights : {false, true})
            if ((!weights || stage == 3) && (!early || mode > 1))
              rows.push_back({stage, world, weights, all_modes()[mode], true, early});
  for (Later& row : rows)
    row.precision.skip_nonfinite = row.precision.skip_nonfinite && !row.early;
  return rows;
}

// A rank with units of a parameter each. The moments of each one are behind a gate of its own.
struct Learner {
  Learner(const Later& row, int rank, const comm::GroupPtr& below, c10::DeviceType type = c10::kPrivateUse1)
      : device(type, type == at::kCPU ? c10::DeviceIndex(-1) : static_cast<c10::DeviceIndex>(rank)) {
    std::vector<engine::ParamSpec> specs;
    const int parts = static_cast<int>(row.sizes.size());
    for (int i = 0; i < parts; ++i) {
      const at::Tensor values = at::linspace(-1, 1, row.sizes[i]).to(device);
      specs.push_back({"w" + std::to_string(i), values.requires_grad_(true), 0, "u" + std::to_string(i)});
      params.push_back(specs.back().tensor);
    }
    engine::Options options = toy_options({.stage = row.stage,
                                           .clip = row.early ? 0.0 : 1.0,
                                           .min_unit = 1,
                                           .persistence = 0,
                                           .precision = row.precision,
                                           .in_backward = row.early,
                                           .runs_on = row.runs_on});
    const auto home = [this, row](Quantity what, int64_t size, const at::TensorOptions& of) {
      const auto part = std::ranges::find(row.sizes, size * row.world);
      const bool gated = what == Quantity::State0 && part != row.sizes.end();
      return std::make_shared<GatedHome>(size, of, gated ? &gates[part - row.sizes.begin()] : nullptr);
    };
    options.zero.home = home;
    if (row.weights) options.zero.weight_home = home;
    comm::GroupPtr group = below;
    if (group->size() > 1 && !device.is_cpu()) group = std::make_shared<StagedGroup>(group);
    engine = std::make_unique<Engine>(options, comm::Mesh(group), specs, std::vector{toy_adamw()});
    for (int i = 0; i < parts; ++i)
      modules.push_back(engine->modules().add({i}));
  }
  // Of a unit that may wait while the backward goes on: the first one that comes there, or of those that the device updates, of
  // which two may wait, the last one.
  Gate& gate_for(const Later& row) { return gates[row.early && row.precision.states_are_narrow() ? 0 : kParts - 1]; }

  at::Tensor use(int i) {
    const at::Tensor x = at::ones({}, device);
    const auto run = [&] { return (params[i].to(at::kFloat) * x - 0.25 * (i + 1)).square().sum(); };
    if (modules[i] < 0) return run();
    if (engine->modules().enter(modules[i])) engine->modules().note_inputs({x});
    const at::Tensor y = run();
    engine->modules().leave(modules[i], {y});
    return y;
  }
  // `between`: called after each module.
  at::Tensor forward(const std::function<void(int)>& between = [](int) {}) {
    engine->pre_forward();
    at::Tensor loss;
    try {
      for (size_t i = 0; i < params.size(); ++i) {
        const at::Tensor y = use(static_cast<int>(i));
        loss = loss.defined() ? loss + y : y;
        between(static_cast<int>(i));
      }
    } catch (...) {
      engine->abort_forward();
      throw;
    }
    engine->post_forward({loss});
    return loss;
  }
  void step() {
    forward().backward();
    engine->step();
  }
  std::vector<at::Tensor> states() {
    std::vector<at::Tensor> all;
    for (int i = 0; i < static_cast<int>(params.size()); ++i)
      for (const auto what : {Quantity::Master, Quantity::State0, Quantity::State1})
        all.push_back(engine->states().get_full(i, what).cpu());
    return all;
  }
  // As they are, without a wait.
  std::vector<at::Tensor> weights() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : params)
      all.push_back(p.detach().cpu());
    return all;
  }

  c10::Device device;
  std::array<Gate, 16> gates;
  Gate& gate = gates[kParts - 1];
  std::vector<at::Tensor> params;
  std::unique_ptr<Engine> engine;
  std::vector<int> modules;
};

// After so many steps that are waited for.
std::vector<std::vector<at::Tensor>> expected_states(Later row, int steps) {
  std::vector<std::vector<at::Tensor>> all;
  row.runs_on = false;
  run_ranks(row.world, [&](int rank, const comm::GroupPtr& group) {
    Learner learner(row, rank, group);
    for (int i = 0; i < steps; ++i) {
      learner.step();
      const auto states = learner.states();
      if (rank == 0) all.push_back(states);
    }
  });
  return all;
}

// step() returns, and the forward's first module has run, before the last unit is updated; its own use waits for it.
TEST(UpdatesThatRunOn, EndBesideTheForward) {
  for (const Later& row : all_later({false})) {
    const std::string what = what_of(row);
    const auto expected = expected_states(row, 2);
    run_ranks(row.world, [&](int rank, const comm::GroupPtr& group) {
      Learner learner(row, rank, group);
      learner.forward().backward();
      learner.gate.set(false);
      const int before = learner.gate.passed();
      learner.engine->step();
      EXPECT_EQ(learner.engine->global_steps(), 1) << what;
      EXPECT_TRUE(learner.engine->was_step_applied()) << what;
      learner.engine->zero_grad();
      learner.engine->groups()[0].lr = 7;  // of the next step
      const at::Tensor loss = learner.forward([&](int i) {
        if (i > 0) return;
        EXPECT_EQ(learner.gate.passed(), before) << what;
        learner.gate.set(true);
      });
      EXPECT_GT(learner.gate.passed(), before) << what;
      learner.engine->groups()[0].lr = toy_adamw().lr;
      loss.backward();
      learner.engine->step();
      const auto states = learner.states();
      EXPECT_TRUE(learner.gate.in_time()) << what;
      if (rank == 0) expect_same(states, expected[1], what);
    });
    EXPECT_STREQ(tessera_stand_in_races(), "") << what;
  }
}

// The backward and step() return before a unit is updated that waits. Then that which the forward uses first is next, and the forward
// goes on before a later one is updated. Of units that the device updates, only the last one may wait so long.
TEST(UpdatesThatRunOn, BeginInTheBackward) {
  for (Later row : all_later({true})) {
    row.sizes.insert(row.sizes.end(), {512, 640});
    const std::string what = what_of(row);
    const auto expected = expected_states(row, 2);
    const bool narrow = row.precision.states_are_narrow();
    run_ranks(row.world, [&](int rank, const comm::GroupPtr& group) {
      Learner learner(row, rank, group);
      auto& gates = learner.gates;
      at::Tensor loss = learner.forward();
      std::array<int, 5> before{};
      for (int i = 0; i < 5; ++i) {
        before[i] = gates[i].passed();
        gates[i].set(narrow && i > 0);
      }
      const auto expect_none = [&] {
        for (int i = 0; i < (narrow ? 1 : 5); ++i)
          EXPECT_EQ(gates[i].passed(), before[i]) << what << ", unit " << i;
      };
      loss.backward();
      expect_none();
      learner.engine->step();
      expect_none();
      EXPECT_EQ(learner.engine->global_steps(), 1) << what;
      learner.engine->groups()[0].lr = 7;  // of the next step
      int waits = -1;  // the unit that the thread is at: the first one that came, unless it was late
      for (int times = 0; times < 3000 && waits < 0; ++times) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        for (int i = 0; i < 5; ++i)
          waits = gates[i].is_waited_for() ? i : waits;
      }
      const int late = waits == 4 ? 3 : 4;
      for (int i = 0; i < 5; ++i)
        gates[i].set(narrow || i != late);
      loss = learner.forward([&](int i) {
        if (i > 0) return;
        EXPECT_GT(gates[0].passed(), before[0]) << what;
        EXPECT_TRUE(narrow || gates[late].passed() == before[late]) << what;
        gates[late].set(true);
      });
      learner.engine->groups()[0].lr = toy_adamw().lr;
      loss.backward();
      learner.engine->step();
      const auto states = learner.states();
      for (const Gate& gate : gates)
        EXPECT_TRUE(gate.in_time()) << what;
      if (rank == 0) expect_same(states, expected[1], what);
    });
    EXPECT_STREQ(tessera_stand_in_races(), "") << what;
  }
}

// What waits for the update is bounded: gradients that the host updates with leave the device, and for all but two units that the
// device updates the backward waits.
TEST(UpdatesThatRunOn, HoldFewGradientsOfTheDevice) {
  constexpr int kMany = 12, kWaits = 2;
  constexpr int64_t kSize = 1 << 14;
  for (const size_t mode : {2, 5}) {
    Later row{.stage = 2, .precision = all_modes()[mode], .early = true, .sizes = {}};
    for (int i = 0; i < kMany; ++i)
      row.sizes.push_back(kSize + 64 * i);
    row.precision.skip_nonfinite = false;
    Learner learner(row, 0, comm::single_group());
    learner.step();
    learner.engine->finish_update();
    const int64_t before = tessera_stand_in_bytes();
    std::atomic<int> came = 0;
    std::atomic<int64_t> most = 0;
    learner.engine->pre_forward();
    at::Tensor loss = at::zeros({}, learner.device);  // whose graph keeps nothing
    for (const at::Tensor& p : learner.params) {
      loss = loss + p.sum();
      p.register_hook([&](const at::Tensor& grad) {
        ++came;
        most = std::max<int64_t>(most, tessera_stand_in_bytes());
        return grad;
      });
    }
    learner.engine->post_forward({loss});
    Gate& gate = learner.gates[kMany - 1];  // the first one of the backward
    gate.set(false);
    const int expected = row.precision.states_are_narrow() ? kWaits + 1 : kMany;
    int came_then = 0;
    std::thread opens([&] {
      for (int i = 0; i < 2000 && came < expected; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      came_then = came;
      gate.set(true);
    });
    loss.backward();
    opens.join();
    EXPECT_EQ(came_then, expected);
    // Besides, autograd's own, which it has in another dtype as well, and the bucket into which that goes.
    const double unit = 2.0 * kSize;
    EXPECT_LT(static_cast<double>(most - before), (kWaits + 4) * unit) << what_of(row);
    EXPECT_LT(static_cast<double>(tessera_stand_in_bytes() - before), kWaits * unit + 4096) << what_of(row);
    learner.engine->step();
    learner.engine->finish_update();
    EXPECT_TRUE(gate.in_time());
    EXPECT_LT(static_cast<double>(tessera_stand_in_bytes() - before), 4096) << what_of(row);
  }
}

// A backward that threw after its first unit was left to the thread: the model is that of two steps until a checkpoint is loaded.
TEST(UpdatesThatRunOn, EndWithABackwardThatThrew) {
  const io::TempFolder folder;
  for (const Later& row : all_later({true})) {
    const std::string what = what_of(row);
    const auto expected = expected_states(row, 2);
    for (const bool loads : {false, true}) {
      run_ranks(row.world, [&](int rank, const comm::GroupPtr& group) {
        Learner learner(row, rank, group);
        learner.step();
        learner.engine->checkpoints().save(folder.path(), {});
        const at::Tensor loss = learner.forward();
        learner.gate.set(false);
        const unsigned hook = learner.params[0].register_hook([](const at::Tensor& grad) {
          TORCH_CHECK(grad.numel() < 0, "the hook throws");
          return grad;
        });
        EXPECT_HAS(error_of([&] { loss.backward(); }), "the hook throws");
        learner.params[0].remove_hook(hook);
        std::thread opens([&] { learner.gate.set(true); });
        if (row.world == 1 && loads && !row.weights) {  // with those, all is reduced at the end
          EXPECT_HAS(message_of<IoError>([&] { learner.engine->step(); }), "after it had updated a part of the model");
          EXPECT_HAS(message_of<IoError>([&] { learner.step(); }), "after it had updated a part of the model");
        }
        if (loads) {
          learner.engine->zero_grad();
          learner.engine->checkpoints().open(folder.path(), "", {})->apply();
          learner.step();
          const auto states = learner.states();
          if (rank == 0) expect_same(states, expected[1], what);
        }
        opens.join();
      });
      EXPECT_STREQ(tessera_stand_in_races(), "") << what;
    }
  }
}

// Who reads or writes states between step() and a forward finds those after the update.
TEST(UpdatesThatRunOn, EndBeforeWhoReadsOrWrites) {
  const io::TempFolder folder;
  const std::vector<std::pair<const char*, std::function<void(Learner&)>>> doors{
      {"finish_update", [](Learner& t) { t.engine->finish_update(); }},
      {"local_view", [](Learner& t) { t.engine->states().local_view(2, Quantity::State0); }},
      {"an evaluation",
       [](Learner& t) {
         const c10::AutoGradMode no_grad(false);
         t.forward();
       }},
      {"a region",
       [](Learner& t) {
         t.engine->regions().open({0, 1, 2});
         t.engine->regions().close({0, 1, 2});
       }},
      {"a save", [&](Learner& t) { t.engine->checkpoints().save(folder.path(), {}); }},
      {"refresh_params", [](Learner& t) { t.engine->refresh_params(); }},
      {"adopt_params", [](Learner& t) { t.engine->adopt_params(); }},
      {"join", [](Learner& t) { t.engine->join(); }},
      {"grad_norm", [](Learner& t) { t.engine->grad_norm(); }},
  };
  for (const Later& row : all_later()) {
    const auto expected = expected_states(row, 1);
    for (const auto& [name, door] : doors) {
      const std::string what = what_of(row) + ", " + name;
      if (row.early && name == std::string("grad_norm")) continue;  // after a step, of no gradients
      run_ranks(row.world, [&](int rank, const comm::GroupPtr& group) {
        Learner learner(row, rank, group);
        Gate& gate = learner.gate_for(row);
        const at::Tensor loss = learner.forward();
        if (!row.early) loss.backward();
        gate.set(false);
        const int before = gate.passed();
        if (row.early) loss.backward();
        learner.engine->step();
        std::thread opens([&] { gate.set(true); });
        door(learner);
        EXPECT_GT(gate.passed(), before) << what;
        opens.join();
        const auto states = learner.states();
        if (rank == 0) expect_same(states, expected[0], what);
        learner.step();
      });
      EXPECT_STREQ(tessera_stand_in_races(), "") << what;
    }
  }
}

// Whole parameters may be read after finish_update(), on all ranks; one rank's keep their values when the engine goes.
TEST(UpdatesThatRunOn, LeaveWholeWeights) {
  for (Later row : all_later()) {
    const int world = row.world;
    if (row.stage < 3 && row.precision.master == amp::Master::Split) {
      for (const bool destroys : {false, true}) {
        std::vector<at::Tensor> expected;
        for (const bool runs_on : {false, true}) {
          row.runs_on = runs_on;
          run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
            Learner learner(row, rank, group);
            learner.step();
            if (!destroys) learner.engine->finish_update();
            KeptWarnings warnings;
            if (destroys) learner.engine->destroy();
            const bool lacks = destroys && runs_on && world > 1;
            EXPECT_EQ(warnings.lines.size(), lacks ? 1U : 0U);
            if (lacks) {
              EXPECT_HAS(warnings.lines.at(0), "call finish_update() on all ranks before");
              return;
            }
            const auto found = learner.weights();
            if (!runs_on && rank == 0) expected = found;
            if (runs_on) expect_same(found, expected, what_of(row));
          });
        }
        EXPECT_STREQ(tessera_stand_in_races(), "");
      }
    }
  }
}

// A whole parameter that is read past its module is waited for as well.
TEST(UpdatesThatRunOn, EndBeforeAUseElsewhere) {
  Learner learner({}, 0, comm::single_group());
  learner.forward().backward();
  learner.gate.set(false);
  learner.engine->step();
  learner.engine->pre_forward();
  learner.use(0);
  EXPECT_TRUE(learner.engine->regions().is_gathered(0));
  EXPECT_FALSE(learner.engine->regions().is_gathered(2));
  learner.gate.set(true);
  learner.engine->modules().use_elsewhere(2);
  EXPECT_TRUE(learner.engine->regions().is_gathered(2));
  learner.engine->abort_forward();
  EXPECT_TRUE(learner.gate.in_time());
}

// On one rank the next call that waits; on several the others go on with it, and all hear of it in the next step at the latest.
TEST(UpdatesThatRunOn, NameADiskThatFails) {
  for (const Later& row : all_later()) {
    for (const bool finishes : {false, true}) {
      const std::string what = what_of(row);
      run_ranks(row.world, [&](int rank, const comm::GroupPtr& group) {
        Learner learner(row, rank, group);
        learner.step();
        learner.engine->finish_update();
        const at::Tensor loss = learner.forward();
        if (!row.early) loss.backward();
        learner.gate.fails = rank == row.world - 1;
        if (row.early) loss.backward();
        learner.engine->step();
        const std::string text = message_of<IoError>([&] {
          if (finishes) return learner.engine->finish_update();
          learner.forward().backward();
          learner.engine->step();
        });
        EXPECT_HAS(text, rank == row.world - 1 ? "the disk fails" : "rank 1 of this engine failed");
        EXPECT_HAS(text, "load a checkpoint");
        EXPECT_EQ(learner.engine->global_steps(), 2) << what;
        learner.gate.fails = false;
        learner.engine->zero_grad();
        const std::string again = message_of<IoError>([&] { learner.step(); });
        EXPECT_HAS(again, "load a checkpoint");
      });
      EXPECT_STREQ(tessera_stand_in_races(), "") << what;
    }
  }
}

// Of a model on the CPU, where all lives on the device, and without the key.
TEST(UpdatesThatRunOn, ChangeNothingElsewhere) {
  Learner on_cpu({}, 0, comm::single_group(), at::kCPU);
  EXPECT_EQ(on_cpu.modules, std::vector<int>(kParts, -1));
  Learner without({.runs_on = false}, 0, comm::single_group());
  EXPECT_EQ(without.modules, std::vector<int>(kParts, -1));
  without.engine->finish_update();
}

}  // namespace
}  // namespace tessera::testing

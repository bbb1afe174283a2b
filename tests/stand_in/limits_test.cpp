// Engines where the device's memory ends, or the device itself: an error that says so, and nothing half done.
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

using engine::Engine;
using shard::Residence;

namespace {

c10::Device device_for_limits(int rank) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(rank)};
}

struct Limited {
  ToyRun run;
  Residence states = Residence::Device, weights = Residence::Device;
  bool timed = false;
};

std::string text_of(const Limited& row) {
  return "stage " + std::to_string(row.run.stage) + (row.run.in_backward ? ", in the backward" : "") + ", states " +
         std::to_string(static_cast<int>(row.states)) + ", weights " + std::to_string(static_cast<int>(row.weights)) +
         ", " + c10::toString(row.run.precision->param);
}

std::vector<Limited> limited_rows() {
  std::vector<Limited> all;
  const auto modes = all_modes();
  for (int stage = 0; stage <= 3; ++stage) {
    for (const size_t mode : {0, 2, 5}) {
      for (const bool in_backward : {false, true}) {
        const ToyRun run{
            .stage = stage, .clip = in_backward ? 0 : 0.5, .precision = modes[mode], .in_backward = in_backward};
        if (in_backward && stage == 0) continue;
        all.push_back({run});
        if (stage > 0) all.push_back({run, Residence::Host});
        if (stage == 3) all.push_back({run, Residence::Host, Residence::Host});
        if (stage == 3) all.push_back({run, Residence::Device, Residence::Host});
      }
    }
  }
  return all;
}

struct Trainee {
  explicit Trainee(const Limited& r, int rank = 0, bool builds = true) : row(r), device(device_for_limits(rank)) {
    for (at::Tensor& t : toy.tensors)
      t = t.detach().to(device).requires_grad_(true);
    if (builds) build(comm::single_group());
  }
  void build(comm::GroupPtr group) {
    engine::Options options = toy_options(row.run);
    options.time_device = row.timed;
    const auto home = [](Residence where) { return offload::state_homes({.residence = where, .pin_memory = true}); };
    if (row.states != Residence::Device) options.zero.home = home(row.states);
    if (row.weights != Residence::Device) options.zero.weight_home = home(row.weights);
    if (group->size() > 1) group = std::make_shared<StagedGroup>(group);
    engine = std::make_unique<Engine>(options, comm::Mesh(group), toy.specs(), std::vector{toy_adamw()});
  }

  void step(int number) {
    toy_forward(*engine, toy, toy_batch(0, number).to(device)).backward();
    engine->step();
  }
  std::vector<at::Tensor> states() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& t : all_states(*engine))
      all.push_back(t.cpu());
    return all;
  }

  Limited row;
  c10::Device device;
  Toy toy;
  std::unique_ptr<Engine> engine;
};

// f() with the n-th allocation of the device failing, for n = 0, 1, ... until nothing fails. `after`: what is left of a
// failure, whose text it gets.
void fail_everywhere(int device, const std::function<void()>& f, const std::function<void(const std::string&)>& after) {
  for (int64_t number = 0;; ++number) {
    ASSERT_LT(number, 1000);
    tessera_stand_in_fail_allocation(device, number);
    std::string text;
    try {
      f();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    tessera_stand_in_fail_allocation(device, -1);
    if (text.empty()) return;
    EXPECT_HAS(text, "has no room for");
    after(text);
  }
}

}  // namespace

// Whatever the piece of a step that fails, the same step can be done again, and comes to the same; or it says that it was half done.
TEST(Limits, AStepWithoutMemoryCanBeDoneAgain) {
  for (const Limited& row : limited_rows()) {
    Trainee expected(row);
    for (int number = 0; number < 3; ++number)
      expected.step(number);
    std::unique_ptr<Trainee> trainee;
    const auto begin = [&] {
      trainee = std::make_unique<Trainee>(row);
      trainee->step(0);
    };
    begin();
    int failed = 0, broken = 0;
    const auto again = [&](const std::string&) {
      ++failed;
      try {
        trainee->engine->zero_grad();
        trainee->engine->states().check_whole();
      } catch (const c10::Error& error) {  // the update began
        ++broken;
        const std::string text = error.what_without_backtrace();
        EXPECT_TRUE(text.find("load a checkpoint") != std::string::npos ||
                    text.find("call step()") != std::string::npos)
            << text;
        begin();
      }
    };
    fail_everywhere(0, [&] { trainee->step(1); }, again);
    EXPECT_GT(failed, 10) << text_of(row);
    const bool whole_always = !row.run.in_backward && row.weights == row.states;
    EXPECT_TRUE(!whole_always || broken == 0) << text_of(row);
    trainee->step(2);
    expect_same(trainee->states(), expected.states(), text_of(row));
    EXPECT_STREQ(tessera_stand_in_races(), "") << text_of(row);
  }
}

// On all ranks of the engine. The model of one rank is what it was, but for rounding, and can be given to another engine.
TEST(Limits, AnEngineWithoutMemoryIsNotBuilt) {
  for (const int world : {1, 2}) {
    for (const Limited& row : limited_rows()) {
      if (row.run.in_backward) continue;
      const int64_t before = tessera_stand_in_bytes(), pinned = tessera_stand_in_pinned_bytes();
      const int failing = world - 1;
      for (const int64_t number : {0, 3, 5}) {
        run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
          std::string text;
          Trainee trainee(row, rank, /*builds=*/false);
          if (rank == failing) tessera_stand_in_fail_allocation(failing, number);
          try {
            trainee.build(group);
          } catch (const c10::Error& error) {
            text = error.what_without_backtrace();
          }
          tessera_stand_in_fail_allocation(failing, -1);
          const std::string what =
              text_of(row) + ", allocation " + std::to_string(number) + ", rank " + std::to_string(rank);
          const bool says = text.find("no memory for the ") != std::string::npos;
          EXPECT_NE(text, "") << what;
          if (world > 1) return;  // one whose agreements find no memory, too
          EXPECT_TRUE(says) << what << ": " << text;
          const Toy plain;
          for (size_t i = 0; i < plain.tensors.size(); ++i) {
            const at::Tensor& is = trainee.toy.tensors[i];
            EXPECT_EQ(is.scalar_type(), at::kFloat) << what;
            EXPECT_TRUE(at::allclose(is.detach().cpu(), plain.tensors[i].detach(), 1e-2)) << what;
          }
          EXPECT_TRUE(trainee.toy.loss(toy_batch(0, 0).to(device_for_limits(0))).isfinite().item<bool>()) << what;
          trainee.build(group);
          Trainee expected(row);
          for (int step = 0; step < 2; ++step) {
            trainee.step(step);
            expected.step(step);
          }
          expect_same(trainee.states(), expected.states(), what);
        });
        if (world > 1) tessera_stand_in_races();  // of collectives that an error ended
        EXPECT_EQ(tessera_stand_in_bytes(), before) << text_of(row);
        EXPECT_EQ(tessera_stand_in_pinned_bytes(), pinned) << text_of(row);
      }
    }
  }
}

TEST(Limits, AGatherWithoutMemoryIsNamed) {
  Trainee trainee({{.stage = 3, .persistence = 0}, Residence::Host, Residence::Host});
  trainee.step(0);
  tessera_stand_in_fail_allocation(0, 0);
  trainee.engine->pre_forward();
  // The bucket of the last step is free; two are needed.
  EXPECT_HAS(error_of([&] { trainee.engine->regions().open({0, 1, 2, 3, 4}); }),
             "no memory for the parameters of unit '");
  trainee.engine->abort_forward();
  tessera_stand_in_fail_allocation(0, -1);
  trainee.step(1);
}

// Destructors and destroy() do not end the program with an error of the device.
TEST(Limits, EnginesEndOnADeviceThatFails) {
  for (Limited row : limited_rows()) {
    for (const bool timed : {false, true}) {
      row.timed = timed;
      for (const std::string when : {"between", "in a forward", "after a backward"}) {
        Trainee trainee(row);
        trainee.step(0);
        if (when == "in a forward" && !trainee.toy.modules.empty() && trainee.toy.modules[0] >= 0)
          trainee.engine->modules().enter(trainee.toy.modules[0]);
        if (when == "after a backward")
          toy_forward(*trainee.engine, trainee.toy, toy_batch(0, 1).to(trainee.device)).backward();
        tessera_stand_in_fail(true);
        EXPECT_HAS(error_of([&] { trainee.step(2); }), "the device fails");
        trainee.engine.reset();
        tessera_stand_in_fail(false);
        tessera_stand_in_races();  // of what it was not told
      }
    }
  }
}

// torch takes the next power of two of every piece of page-locked memory.
TEST(Limits, PageLockedMemoryIsLittleMoreThanWhatIsAsked) {
  constexpr int64_t kSize = 700'000;
  const int64_t before = tessera_stand_in_pinned_bytes();
  {
    std::vector<engine::ParamSpec> specs;
    for (int i = 0; i < 12; ++i)
      specs.push_back({"w" + std::to_string(i),
                       at::ones({kSize * (i == 5 ? 10 : 1)}, device_for_limits(0)).requires_grad_(true), 0,
                       "u" + std::to_string(i)});
    engine::Options options = toy_options({.stage = 2, .min_unit = 1});
    options.zero.home = offload::state_homes({.residence = Residence::Host, .pin_memory = true});
    const Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
    const auto asked = static_cast<double>(engine.memory().host);
    const auto got = static_cast<double>(tessera_stand_in_pinned_bytes() - before);
    EXPECT_GT(asked, 3 * 4 * 21 * kSize - 1);
    EXPECT_LT(got, 1.25 * asked);
  }
  EXPECT_EQ(tessera_stand_in_pinned_bytes(), before);
}

}  // namespace tessera::testing

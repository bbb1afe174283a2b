// Engines where the device's memory ends: an error that says so, and nothing half done.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>

#include "tessera/engine/checkpoint.h"
#include "tests/io/temp_folder.h"
#include "tests/stand_in/trainee.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

namespace {

// For n = 0, 1, ... until nothing fails. `after`: what is left of a failure, whose text it gets.
void fail_everywhere(const std::function<void()>& f, const std::function<void(const std::string&)>& after) {
  for (int64_t number = 0;; ++number) {
    ASSERT_LT(number, 1000);
    const Outcome outcome = outcome_without_memory(0, number, f);
    if (outcome.text.empty()) return;
    EXPECT_TRUE(outcome.of_memory) << outcome.text;
    EXPECT_HAS(outcome.text, "has no room for");
    after(outcome.text);
  }
}

// On rank 1 of two, for some n. `f(rank, group, number)` calls outcome_without_memory() there; false: nothing failed.
void fail_on_one_rank(const std::function<bool(int64_t number)>& f) {
  for (int64_t number = 0; f(number); ++number)
    ASSERT_LT(number, 1000);
}

}  // namespace

// A user's, between steps, to what is whole.
void write_to(const Trainee& trainee) {
  const c10::AutoGradMode no_grad(false);
  for (at::Tensor t : trainee.toy.tensors)
    if (error_of([&] { t.storage().data(); }).empty()) t.mul_(1.25);
}

// Whatever the piece of a step that fails, the same step can be done again, and comes to the same; or it says that it was half done.
void expect_a_step_can_be_done_again(const Limited& row, bool written) {
  const auto first = [&](Trainee& t) {
    t.step(0);
    if (written) write_to(t);
  };
  Trainee expected(row);
  first(expected);
  for (int number = 1; number < 3; ++number)
    expected.step(number);
  std::unique_ptr<Trainee> trainee;
  const auto begin = [&] {
    trainee = std::make_unique<Trainee>(row);
    first(*trainee);
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
      EXPECT_TRUE(text.find("load a checkpoint") != std::string::npos || text.find("call step()") != std::string::npos)
          << text;
      begin();
    }
  };
  fail_everywhere([&] { trainee->step(1); }, again);
  EXPECT_GT(failed, 10) << text_of(row);
  const bool whole_always = !row.run.in_backward && row.weights == row.states;
  EXPECT_TRUE(!whole_always || broken == 0) << text_of(row);
  trainee->step(2);
  expect_same(trainee->states(), expected.states(), text_of(row) + (written ? ", written to" : ""));
  EXPECT_STREQ(tessera_stand_in_races(), "") << text_of(row);
}

TEST(Limits, AStepWithoutMemoryCanBeDoneAgain) {
  const io::TempFolder disk;
  for (const bool written : {false, true})
    for (const Limited& row : limited_rows({0, 2, 5}, /*small=*/true, disk.path()))
      expect_a_step_can_be_done_again(row, written);
}

// Allocations that a step of the model makes without an engine.
int allocations_of_the_model(const Limited& row) {
  Toy toy = Trainee(row, 0, /*builds=*/false).toy;
  for (at::Tensor& t : toy.tensors)
    t = t.detach().to(row.run.precision->param).requires_grad_(t.requires_grad());
  int number = 0;
  fail_everywhere([&] { toy.loss(toy_batch(0, 1).to(device_for_limits(0))).backward(); },
                  [&](const std::string&) {
                    ++number;
                    for (at::Tensor& t : toy.tensors)
                      t.mutable_grad().reset();
                  });
  return number;
}

struct Call {
  const char* name;
  std::function<void(Trainee&)> make;
  bool first = false;  // before any step
};

std::vector<Call> calls_of_all_ranks() {
  return {{"a step", [](Trainee& t) { t.step(1); }},
          {"the first step", [](Trainee& t) { t.step(1); }, true},
          {"a region",
           [](Trainee& t) {
             t.engine->regions().open({0, 1, 2, 3, 4});
             t.engine->regions().close({0, 1, 2, 3, 4}, zero::Writes::FromRank, 0);
           }},
          {"a value", [](Trainee& t) { t.engine->states().get_full(3, engine::Quantity::Master); }}};
}

// What two ranks have when memory fails on the second one: the same error, or all that they have in common ends with it. None
// waits for the other's timeout, and no call meets another one. What the model lacks memory for is its own affair.
TEST(Limits, AStepWithoutMemoryOnOneOfTwoRanksIsOneOfBoth) {
  const io::TempFolder disk;
  for (const Limited& row : limited_rows({2, 4}, /*small=*/false, disk.path())) {
    const bool narrow = row.run.precision->states_are_narrow();
    for (const Call& call : calls_of_all_ranks()) {
      const bool steps = call.first || call.name == std::string("a step");
      if (!steps && (row.run.in_backward || narrow)) continue;
      int failed = 0, of_model = 0;
      fail_on_one_rank([&](int64_t number) {
        std::array<Outcome, 2> first, next;
        bool the_models = false;
        const auto begin = std::chrono::steady_clock::now();
        run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
          Trainee trainee(row, rank, /*builds=*/false);
          trainee.build(group);
          if (!call.first) trainee.step(0);
          const auto make = [&] { call.make(trainee); };
          first[rank] = rank == 1 ? outcome_without_memory(1, number, make) : outcome_of(make);
          if (rank == 1 && steps && first[1].of_memory && !first[1].has("[zero] ")) {
            the_models = true;
            return group->abort("the model has no memory");
          }
          outcome_of([&] { trainee.engine->zero_grad(); });
          next[rank] = outcome_of([&] { trainee.step(2); });
        });
        const std::string what = text_of(row) + ", " + call.name + ", allocation " + std::to_string(number) + ": ";
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60)) << what;
        EXPECT_STREQ(tessera_stand_in_races(), "") << what;
        if (the_models) return ++of_model > 0;
        if (first[1].text.empty()) {
          EXPECT_EQ(first[0].text + next[0].text + next[1].text, "") << what;
          return false;
        }
        ++failed;
        EXPECT_TRUE(first[1].of_memory && first[1].has("has no room for")) << what << first[1].text;
        if (first[0].of_memory) {
          EXPECT_TRUE(first[0].has("ran out of memory")) << what << first[0].text;
          EXPECT_EQ(next[0].text.empty(), next[1].text.empty()) << what << next[0].text << next[1].text;
          EXPECT_TRUE(next[0].text.empty() || next[0].has("load a checkpoint")) << what << next[0].text;
        } else {
          EXPECT_TRUE(first[0].text.empty() || first[0].has("has no room for")) << what << first[0].text;
          for (const Outcome& outcome : next)
            EXPECT_TRUE(outcome.has("has no room for") || outcome.has("load a checkpoint") ||
                        outcome.has("call step()"))
                << what << outcome.text;
        }
        return true;
      });
      EXPECT_TRUE(failed > 0 || !steps) << text_of(row) << ", " << call.name;
      EXPECT_LE(of_model, allocations_of_the_model(row)) << text_of(row);
    }
  }
}

// The model of one rank is what it was, but for rounding, and can be given to another engine.
TEST(Limits, AnEngineWithoutMemoryIsNotBuilt) {
  const io::TempFolder disk;
  for (const bool small : {true, false}) {
    for (const Limited& row : limited_rows({0, 2, 5}, small, disk.path())) {
      if (row.run.in_backward) continue;
      const int64_t before = tessera_stand_in_bytes(), pinned = tessera_stand_in_pinned_bytes();
      {
        Trainee expected(row);
        for (int step = 0; step < 2; ++step)
          expected.step(step);
        const Toy plain;
        auto trainee = std::make_unique<Trainee>(row, 0, /*builds=*/false);
        int failed = 0;
        const auto build = [&] { trainee->build(comm::single_group()); };
        fail_everywhere(build, [&](const std::string& text) {
          const std::string what = text_of(row) + ", allocation " + std::to_string(failed++);
          EXPECT_HAS(text, "no memory for the ");
          for (size_t i = 0; i < plain.tensors.size(); ++i) {
            const at::Tensor& is = trainee->toy.tensors[i];
            EXPECT_EQ(is.scalar_type(), at::kFloat) << what;
            EXPECT_TRUE(at::allclose(is.detach().cpu(), plain.tensors[i].detach(), 1e-2)) << what;
          }
          EXPECT_TRUE(trainee->toy.loss(toy_batch(0, 0).to(device_for_limits(0))).isfinite().item<bool>()) << what;
          build();
          for (int step = 0; step < 2; ++step)
            trainee->step(step);
          expect_same(trainee->states(), expected.states(), what);
          trainee = std::make_unique<Trainee>(row, 0, /*builds=*/false);
        });
        EXPECT_GT(failed, 2) << text_of(row);
      }
      EXPECT_EQ(tessera_stand_in_bytes(), before) << text_of(row);
      EXPECT_EQ(tessera_stand_in_pinned_bytes(), pinned) << text_of(row);
      EXPECT_STREQ(tessera_stand_in_races(), "") << text_of(row);
    }
  }
}

// Nor on any other rank.
TEST(Limits, AnEngineOfTwoRanksWithoutMemoryIsNotBuilt) {
  const io::TempFolder disk;
  for (const Limited& row : limited_rows({2}, /*small=*/false, disk.path())) {
    if (row.run.in_backward) continue;
    const int64_t before = tessera_stand_in_bytes(), pinned = tessera_stand_in_pinned_bytes();
    fail_on_one_rank([&](int64_t number) {
      std::array<Outcome, 2> found;
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        Trainee trainee(row, rank, /*builds=*/false);
        const auto build = [&] { trainee.build(group); };
        found[rank] = rank == 1 ? outcome_without_memory(1, number, build) : outcome_of(build);
      });
      if (found[1].text.empty()) {
        EXPECT_EQ(found[0].text, "");
        return false;
      }
      const std::string what = text_of(row) + ", allocation " + std::to_string(number) + ": ";
      EXPECT_TRUE(found[1].of_memory && found[1].has("has no room for")) << what << found[1].text;
      EXPECT_TRUE(found[0].has("has no room for") || (found[0].of_memory && found[0].has("ran out of memory")))
          << what << found[0].text;
      return true;
    });
    EXPECT_STREQ(tessera_stand_in_races(), "") << text_of(row);
    EXPECT_EQ(tessera_stand_in_bytes(), before) << text_of(row);
    EXPECT_EQ(tessera_stand_in_pinned_bytes(), pinned) << text_of(row);
  }
}

// A value error after the parameters were given away is no other case.
TEST(Limits, AnEngineThatIsRefusedLeavesTheModel) {
  Trainee trainee({{.stage = 3, .persistence = 0}, Residence::Device, Residence::Host}, 0, /*builds=*/false);
  engine::Options options = toy_options(trainee.row.run);
  options.rule = optim::Rule::External;
  options.zero.weight_home = offload::state_homes({.residence = Residence::Host, .pin_memory = true});
  EXPECT_HAS(
      error_of<c10::ValueError>([&] { Engine(options, comm::Mesh(), trainee.toy.specs(), std::vector{toy_adamw()}); }),
      "a client's own optimizer");
  const Toy plain;
  for (size_t i = 0; i < plain.tensors.size(); ++i)
    EXPECT_TRUE(trainee.toy.tensors[i].detach().cpu().equal(plain.tensors[i].detach())) << i;
}

// Of a checkpoint that was saved inside an accumulation: it is refused, and nothing has changed, or steps are errors until
// another load comes to its end.
TEST(Limits, ALoadWithoutMemoryIsRefusedOrSaysThatItIsHalfDone) {
  const io::TempFolder disk;
  for (Limited row : limited_rows({0, 2, 4}, /*small=*/false, disk.path())) {
    if (row.run.in_backward) continue;
    row.run.accumulation = 2;
    const io::TempFolder folder;
    const auto load = [&](Trainee& t) { t.engine->checkpoints().open(folder.path(), "", {})->apply(); };
    std::vector<at::Tensor> expected, before;
    {
      Trainee saved(row);
      for (int number = 0; number < 3; ++number)
        saved.step(number);
      saved.engine->checkpoints().save(folder.path(), {});
      saved.step(3);
      expected = saved.states();
    }
    std::unique_ptr<Trainee> trainee;
    const auto begin = [&] {
      trainee = std::make_unique<Trainee>(row);
      for (int number = 10; number < 12; ++number)
        trainee->step(number);
      before = trainee->states();
    };
    begin();
    int refused = 0, failed = 0;
    fail_everywhere([&] { load(*trainee); },
                    [&](const std::string& text) {
                      const std::string what = text_of(row) + ", allocation " + std::to_string(failed++) + ": " + text;
                      if (outcome_of([&] { trainee->engine->states().check_whole(); }).text.empty()) {
                        ++refused;
                        expect_same(trainee->states(), before, what);
                      } else {
                        EXPECT_HAS(text, "load again");
                        EXPECT_HAS(error_of([&] { trainee->step(12); }), "load a checkpoint") << what;
                      }
                      load(*trainee);
                      trainee->step(3);
                      expect_same(trainee->states(), expected, what);
                      begin();
                    });
    EXPECT_GT(refused, 0) << text_of(row);
    trainee->step(3);
    expect_same(trainee->states(), expected, text_of(row));
    EXPECT_STREQ(tessera_stand_in_races(), "") << text_of(row);
  }
}

// All ranks have the error, load again and go on; or, where not even what they tell each other has room, none does.
TEST(Limits, ALoadWithoutMemoryOnOneOfTwoRanksIsOneOfBoth) {
  const io::TempFolder disk;
  for (Limited row : limited_rows({2, 4}, /*small=*/false, disk.path())) {
    if (row.run.in_backward) continue;
    const io::TempFolder folder;
    const auto load = [&](Trainee& t) { t.engine->checkpoints().open(folder.path(), "", {})->apply(); };
    int agreed = 0;
    fail_on_one_rank([&](int64_t number) {
      std::array<Outcome, 2> first, next;
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        Trainee trainee(row, rank, /*builds=*/false);
        trainee.build(group);
        trainee.step(0);
        if (number == 0) trainee.engine->checkpoints().save(folder.path(), {});
        trainee.step(1);
        const auto make = [&] { load(trainee); };
        first[rank] = rank == 1 ? outcome_without_memory(1, number, make) : outcome_of(make);
        next[rank] = outcome_of([&] {
          load(trainee);
          trainee.step(2);
        });
      });
      const std::string what = text_of(row) + ", allocation " + std::to_string(number) + ": ";
      EXPECT_EQ(first[0].text.empty(), first[1].text.empty()) << what << first[0].text << first[1].text;
      EXPECT_EQ(next[0].text.empty(), next[1].text.empty()) << what << next[0].text << next[1].text;
      EXPECT_TRUE(next[0].text.empty() || !first[0].of_memory) << what << next[0].text;
      agreed += first[0].of_memory ? 1 : 0;
      return !first[1].text.empty();
    });
    EXPECT_GT(agreed, 0) << text_of(row);
    EXPECT_STREQ(tessera_stand_in_races(), "") << text_of(row);
  }
}

// At its start: it is not open. At its end: steps are errors until a checkpoint is loaded.
TEST(Limits, ARegionWithoutMemoryIsNotOpenOrSaysThatItIsHalfTaken) {
  const std::vector<zero::ParamId> params{0, 1, 2, 3, 4};
  const io::TempFolder disk;
  int half_taken = 0, not_open = 0;
  for (const Limited& row : limited_rows({0, 1, 2, 4, 5}, /*small=*/false, disk.path())) {
    if (row.run.in_backward) continue;
    Trainee expected(row);
    expected.step(0);
    expected.step(1);
    std::unique_ptr<Trainee> trainee;
    const auto begin = [&] {
      trainee = std::make_unique<Trainee>(row);
      trainee->step(0);
    };
    const auto open = [&] { trainee->engine->regions().open(params); };
    const auto close = [&] { trainee->engine->regions().close(params, zero::Writes::FromRank, 0); };
    begin();
    fail_everywhere(open, [&](const std::string& text) {
      EXPECT_HAS(text, "no memory for ");
      ++not_open;
      open();
      close();
    });
    close();
    trainee->step(1);
    expect_same(trainee->states(), expected.states(), text_of(row) + ", at its start");

    const auto edit = [&] {
      begin();
      open();
      const c10::NoGradGuard no_grad;
      for (at::Tensor t : trainee->toy.tensors)
        t.detach().mul_(0.5);
    };
    edit();
    fail_everywhere(close, [&](const std::string& text) {
      EXPECT_HAS(text, "no memory for what was written to parameter '");
      ++half_taken;
      EXPECT_HAS(error_of([&] { trainee->step(1); }), "load a checkpoint") << text_of(row);
      edit();
    });
    EXPECT_STREQ(tessera_stand_in_races(), "") << text_of(row);
  }
  EXPECT_GT(not_open, 100);
  EXPECT_GT(half_taken, 100);
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

// A graph would replay kernels and none of what the engine does on the host: refused before anything is done. A forward that
// trains nothing may be captured where all parameters lie still.
TEST(Limits, NothingThatTrainsIsCaptured) {
  for (const Limited& row : limited_rows({0, 5})) {
    Trainee expected(row), trainee(row);
    const auto refused = [&](const char* call, const std::function<void()>& f) {
      tessera_stand_in_capture(true);
      const std::string text = error_of(f);
      tessera_stand_in_capture(false);
      EXPECT_HAS(text, std::string("[engine] ") + call + ": the current stream is being captured");
    };
    for (int number = 0; number < 3; ++number) {
      Engine& engine = *trainee.engine;
      at::Tensor loss;
      const auto forward = [&] { loss = toy_forward(engine, trainee.toy, toy_batch(0, number).to(trainee.device)); };
      refused("forward", forward);
      tessera_stand_in_capture(true);
      {
        const c10::NoGradGuard no_grad;
        const std::string text = error_of(forward);
        EXPECT_EQ(text.empty(), row.run.stage < 3) << text;
      }
      tessera_stand_in_capture(false);
      forward();
      refused("backward", [&] { engine.backward(loss); });
      refused("backward", [&] { loss.backward(); });
      engine.backward(loss);
      refused("step", [&] { engine.step(); });
      engine.step();
      expected.step(number);
    }
    expect_same(trainee.states(), expected.states(), text_of(row));
  }
  EXPECT_STREQ(tessera_stand_in_races(), "");
}

// Buckets come back to their pools where what they were lent for ends with an error.
TEST(Limits, ErrorsKeepNoBuckets) {
  static std::atomic<bool> breaks;
  Trainee trainee({{.stage = 2, .min_unit = 1}, Residence::Host});
  for (int number = 0; number < 2; ++number)
    trainee.step(number);
  const int64_t before = trainee.engine->memory().buckets;
  tessera_stand_in_on_copy([](bool to_host, int64_t) {
    if (to_host && breaks.exchange(false)) throw std::runtime_error("the copy breaks");
  });
  for (int number = 2; number < 6; ++number) {
    const at::Tensor loss = toy_forward(*trainee.engine, trainee.toy, toy_batch(0, number).to(trainee.device));
    breaks = true;
    EXPECT_HAS(error_of([&] { loss.backward(); }), "the copy breaks");
    trainee.engine->zero_grad();
  }
  tessera_stand_in_on_copy(nullptr);
  trainee.step(2);
  EXPECT_LE(trainee.engine->memory().buckets, before);

  const auto fails = std::make_shared<std::string>();
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    Trainee mine({{.stage = 2, .clip = 0, .min_unit = 1, .in_backward = true, .unit_clip = 0.5}}, rank, false);
    mine.build(group, fails);
    for (int number = 0; number < 2; ++number)
      mine.step(number);
    const int64_t had = mine.engine->memory().buckets;
    group->barrier("before");
    if (rank == 0) *fails = "norm of unit";
    group->barrier("from here on");
    for (int number = 2; number < 6; ++number) {
      EXPECT_HAS(error_of([&] { mine.step(number); }), "fails, as was asked for");
      mine.engine->zero_grad();
    }
    group->barrier("up to here");
    if (rank == 0) fails->clear();
    group->barrier("behind");
    mine.step(2);
    EXPECT_LE(mine.engine->memory().buckets, had);
  });
}

// Weights in host memory that cannot be read on one of two ranks: it says so, and the other does not wait.
TEST(Limits, WeightsThatOneRankCannotReadAreAnErrorOfBoth) {
  struct Fragile final : shard::Home {
    Fragile(shard::HomePtr home, std::shared_ptr<std::atomic<bool>> breaks)
        : below(std::move(home)), broken(std::move(breaks)) {}
    Residence residence() const override { return below->residence(); }
    shard::PendingView fetch(shard::Range range) override {
      TORCH_CHECK(!*broken, "these weights cannot be read");
      return below->fetch(range);
    }
    void store(shard::Range range, const at::Tensor& values) override { below->store(range, values); }
    shard::HomePtr below;
    std::shared_ptr<std::atomic<bool>> broken;
  };
  for (const bool rounded : {false, true}) {
    std::array<std::string, 2> first, next;
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const auto breaks = std::make_shared<std::atomic<bool>>(false);
      engine::Options options = toy_options({.stage = 3, .persistence = 0});
      options.zero.weight_home = [breaks, make = offload::state_homes({.pin_memory = true})](auto... args) {
        return std::make_shared<Fragile>(make(args...), breaks);
      };
      Trainee trainee({}, rank, /*builds=*/false);
      std::vector<engine::ParamSpec> specs = trainee.toy.specs();
      if (rounded)
        for (engine::ParamSpec& spec : specs)
          spec.comm = at::kBFloat16;
      trainee.engine = std::make_unique<Engine>(options, comm::Mesh(std::make_shared<StagedGroup>(group)), specs,
                                                std::vector{toy_adamw()});
      trainee.step(0);
      *breaks = rank == 1;
      first[rank] = error_of([&] { trainee.step(1); });
      *breaks = false;
      next[rank] = error_of([&] {
        trainee.engine->zero_grad();
        trainee.step(2);
      });
    });
    for (const std::string& text : {first[0], first[1], next[0], next[1]})
      EXPECT_HAS(text, "these weights cannot be read");
    EXPECT_STREQ(tessera_stand_in_races(), "");
  }
}

// Also that of states that were away for a while.
TEST(Limits, PageLockedMemoryGoesBackToTheSystem) {
  using enum zero::StateKind;
  const std::vector<zero::StateKind> kinds{OptimizerStates, Masters, Weights, Gradients, Buckets};
  const int64_t before = tessera_stand_in_pinned_bytes();
  for (const auto states : {Residence::Device, Residence::Host}) {
    for (const bool weights : {false, true}) {
      for (const bool reloads : {true, false}) {
        const std::string what = "states " + std::to_string(static_cast<int>(states)) + (weights ? ", weights" : "") +
                                 (reloads ? ", reloaded" : "");
        Trainee trainee({{.stage = 3}, states, weights ? Residence::Host : Residence::Device});
        trainee.step(0);
        const int64_t built = tessera_stand_in_pinned_bytes();
        if (states == Residence::Device && !weights) {
          EXPECT_EQ(built, before);
          trainee.engine->offload_states(kinds);
          EXPECT_GT(tessera_stand_in_pinned_bytes(), before);
          if (reloads) {
            trainee.engine->reload_states();
            EXPECT_EQ(tessera_stand_in_pinned_bytes(), before) << what;
            trainee.step(1);
          }
        }
        trainee.engine->destroy();
        EXPECT_EQ(tessera_stand_in_pinned_bytes(), before) << what;
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

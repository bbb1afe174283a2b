// Engines that end: amid what is on its way, and where the device or its memory fails.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "tests/io/temp_folder.h"
#include "tests/stand_in/trainee.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::testing {
namespace {

// What is on its way when an engine ends, after a forward that is under way, or threw, and after a backward: a gather, a
// reduction, gradients that leave, or a gather of a disk that fails. `elsewhere`: it ends under another stream.
void end_amid_copies(const Limited& row, const std::string& when, bool elsewhere, int rank,
                     const comm::GroupPtr& group) {
  Trainee trainee(row, rank, /*builds=*/false);
  trainee.build(group);
  const c10::impl::VirtualGuardImpl guard(c10::kPrivateUse1);
  c10::Event used(c10::kPrivateUse1);
  {
    const c10::StreamGuard under(guard.getStreamFromGlobalPool(trainee.device));
    c10::Event built(c10::kPrivateUse1);
    built.record(guard.getDefaultStream(trainee.device));
    built.block(under.current_stream());
    at::Tensor x = toy_batch(rank, 0).to(trainee.device);
    const auto forward = [&] { return toy_forward(*trainee.engine, trainee.toy, x); };
    for (int i = 0; i < 2; ++i) {
      forward().backward();
      trainee.engine->step();
    }
    const int module = trainee.toy.modules[0], whole = trainee.toy.whole;
    const auto enter = [&](int which) {
      if (which >= 0) trainee.engine->modules().enter(which);
    };
    if (when == "in a forward") {
      enter(whole);
      enter(module);
    } else if (when == "after one that threw") {
      trainee.engine->pre_forward();
      enter(whole);
      enter(module);
      if (module >= 0) trainee.engine->modules().abort(module);
      if (whole >= 0) trainee.engine->modules().abort(whole);
      trainee.engine->abort_forward();
    } else if (when == "in a backward that threw") {
      x = x.requires_grad_(true);
      const at::Tensor loss = forward();
      x.register_hook([](const at::Tensor& grad) {
        TORCH_CHECK(grad.numel() < 0, "the hook throws");
        return grad;
      });
      EXPECT_HAS(error_of([&] { loss.backward(); }), "the hook throws");
    } else {
      forward().backward();
      if (when == "after two" && !row.run.in_backward) forward().backward();
    }
    if (!elsewhere) return trainee.engine->destroy();
    used.record(under.current_stream());
  }
  used.block(guard.getStream(trainee.device));  // for what the model itself does there; the rest is the engine's
  trainee.engine->destroy();
}

std::vector<Limited> rows_to_end(const std::string& folder) {
  std::vector<Limited> all;
  for (const auto where : {Residence::Device, Residence::Host, Residence::Nvme}) {
    for (const int stage : {0, 2, 3}) {
      for (const bool in_backward : {false, true}) {
        if (stage == 0 && (in_backward || where != Residence::Device)) continue;
        ToyRun run{.stage = stage, .min_unit = 1, .persistence = 0, .in_backward = in_backward};
        if (in_backward) run.clip = 0;
        if (in_backward) run.unit_clip = 0.5;
        all.push_back({.run = run, .states = where, .folder = folder});
        if (stage == 3) all.back().weights = where;
        if (where == Residence::Device) continue;
        all.push_back(all.back());
        all.back().run.runs_on = true;
        all.push_back(all.back());
        all.back().run.runs_on = false;
        all.back().pin = false;
      }
    }
  }
  return all;
}

bool any_whole(engine::Engine& engine) {
  const zero::Regions& regions = engine.regions();
  for (int id = 0; id < static_cast<int>(engine.params().size()); ++id) {
    if (regions.partition_of(id).partitioned && regions.is_gathered(id)) return true;
  }
  return false;
}

}  // namespace

TEST(Endings, AmidCopies) {
  const io::TempFolder folder;
  for (const Limited& row : rows_to_end(folder.path())) {
    for (const int world : {1, 2}) {
      for (const bool elsewhere : {false, true}) {
        for (const std::string when :
             {"in a forward", "after one that threw", "in a backward that threw", "after a backward", "after two"}) {
          run_ranks(world,
                    [&](int rank, const comm::GroupPtr& group) { end_amid_copies(row, when, elsewhere, rank, group); });
          EXPECT_STREQ(tessera_stand_in_races(), "") << text_of(row) << (row.pin ? "" : ", pageable") << ", " << when
                                                     << ", world " << world << (elsewhere ? ", elsewhere" : "");
        }
      }
    }
  }
}

// Destructors and destroy() do not end the program with an error of the device. That of destroy() is told, and the engine is
// gone.
TEST(Endings, OnADeviceThatFails) {
  for (Limited row : limited_rows()) {
    for (const bool timed : {false, true}) {
      row.timed = timed;
      for (const std::string when : {"between", "in a forward", "after a backward"}) {
        for (const bool destroys : {false, true}) {
          Trainee trainee(row);
          trainee.step(0);
          if (when == "in a forward" && !trainee.toy.modules.empty() && trainee.toy.modules[0] >= 0)
            trainee.engine->modules().enter(trainee.toy.modules[0]);
          if (when == "after a backward")
            toy_forward(*trainee.engine, trainee.toy, toy_batch(0, 1).to(trainee.device)).backward();
          tessera_stand_in_fail(true);
          EXPECT_HAS(error_of([&] { trainee.step(2); }), "the device fails");
          // What is whole keeps its values, for which it needs the device.
          const bool keeps = destroys && any_whole(*trainee.engine);
          EXPECT_EQ(destroys ? error_of([&] { trainee.engine->destroy(); }) : "",
                    keeps ? "[stand_in] the device fails, as was asked for" : "");
          EXPECT_EQ(trainee.engine->destroyed(), destroys);
          trainee.engine.reset();
          tessera_stand_in_fail(false);
          tessera_stand_in_races();  // of what it was not told
        }
      }
    }
  }
}

// What destroy() brings back to the device finds none, or no memory there.
TEST(Endings, WhereWeightsCannotComeBack) {
  for (const bool memory : {true, false}) {
    for (int stage = 1; stage <= 3; ++stage) {
      Trainee trainee({{.stage = stage, .min_unit = 1}});
      trainee.step(0);
      trainee.engine->offload_states({zero::StateKind::Weights});
      tessera_stand_in_fail(!memory);
      const auto destroy = [&] { trainee.engine->destroy(); };
      const Outcome outcome = memory ? outcome_without_memory(0, 0, destroy) : outcome_of(destroy);
      tessera_stand_in_fail(false);
      EXPECT_TRUE(memory ? outcome.of_memory : outcome.has("the device fails")) << outcome.text;
      EXPECT_TRUE(trainee.engine->destroyed());
      EXPECT_EQ(error_of(destroy), "");
      int back = 0;
      for (const at::Tensor& t : trainee.toy.tensors)
        back += error_of([&] { t.storage().data(); }).empty() ? 1 : 0;
      EXPECT_EQ(back > 0, memory) << "all but one unit's";
      tessera_stand_in_races();
    }
  }
}

}  // namespace tessera::testing

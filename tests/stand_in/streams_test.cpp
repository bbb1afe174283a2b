// Engines on streams of the user's, alone and with other ranks: the bits of the default stream, and no race.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "tessera/engine/checkpoint.h"
#include "tessera/offload/states.h"
#include "tessera/shard/side_stream.h"
#include "tests/io/temp_folder.h"
#include "tests/stand_in/staged_group.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"
#include "tests/support/training.h"

namespace tessera::testing {
namespace {

using shard::Residence;

// Beside the training: saves in the background; saves that are loaded at once; a second engine under the same loss; another
// training in a thread.
enum class Beside { Nothing, Saves, Loads, AnEngine, AThread };

struct Row {
  ToyRun run;
  int world;
  Residence states = Residence::Device, weights = Residence::Device;
  Beside beside = Beside::Nothing;
};

std::string name(const Row& row) {
  const ToyRun& run = row.run;
  return "stage " + std::to_string(run.stage) + ", world " + std::to_string(row.world) + ", accumulation " +
         std::to_string(run.accumulation) + (run.in_backward ? ", in the backward" : "") +
         (run.runs_on ? ", running on" : "") + ", states " + std::to_string(static_cast<int>(row.states)) +
         ", weights " + std::to_string(static_cast<int>(row.weights)) + ", beside " +
         std::to_string(static_cast<int>(row.beside));
}

// f() on a stream of its own, between what the current one was given before and what it is given then.
template <class F>
void on_a_stream(c10::Device device, const F& f) {
  const auto before = shard::mark(device);
  std::shared_ptr<c10::Event> after;
  {
    const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
    shard::come_after(*before, device);
    f();
    after = shard::mark(device);
  }
  shard::come_after(*after, device);
}

Toy toy_there(c10::Device device) {
  Toy toy;
  toy.enclosed = true;
  for (at::Tensor& t : toy.tensors)
    t = t.detach().to(device).requires_grad_(true);
  return toy;
}

// Memory that came back is free for streams that have not waited for this one, too.
void expect_no_races() {
  EXPECT_STREQ(tessera_stand_in_races(), "");
}

// Trains as row.beside says. Saves of three steps are on their way while the next ones are made.
ToyTrained train_beside(const Row& row, engine::Engine& engine, const Toy& toy, int rank, const comm::GroupPtr& group,
                        const std::filesystem::path& folder) {
  const c10::Device device = toy.tensors[0].device();
  ToyTraining how{.batch = [&](int of, int number) { return toy_batch(of, number).to(device); }};
  std::optional<engine::Engine> second;
  const Toy other = toy_there(device);
  int calls = 0;
  if (row.beside == Beside::Saves)
    how.between = [&] {
      if (++calls % 3 == 0 && calls < 12)
        engine.checkpoints().save(folder / "saved", {.tag = "t" + std::to_string(calls), .asynchronous = true});
    };
  if (row.beside == Beside::Loads)
    how.between = [&] {
      if (++calls % 3 != 0) return;
      engine.checkpoints().save(folder / "loaded", {});
      engine.checkpoints().open(folder / "loaded", "", {})->apply();
    };
  if (row.beside == Beside::AnEngine) {
    second.emplace(toy_options({.stage = 3 - row.run.stage, .min_unit = 1, .persistence = 0}), comm::Mesh(group),
                   other.specs(), std::vector{toy_adamw()});
    how.loss = [&](const Toy& mine, engine::Engine& first, const at::Tensor& x, int, int) {
      return toy_forward(first, mine, x) + 0 * toy_forward(*second, other, x);
    };
    how.between = [&] {
      if (++calls % 3 == 0) second->step();
    };
  }
  how.between = [between = how.between] {
    between();
    expect_no_races();
  };
  ToyTrained trained = train_toy(engine, toy, rank, how);
  if (row.beside == Beside::Saves) engine.checkpoints().wait();
  return trained;
}

// On the devices from `first` on.
ToyTrained train(const Row& row, bool stream, const std::filesystem::path& folder, int first = 0) {
  ToyTrained trained;
  run_ranks(row.world, [&](int rank, const comm::GroupPtr& below) {
    const auto group = std::make_shared<StagedGroup>(below);
    const c10::Device device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(first + rank));
    const Toy toy = toy_there(device);
    engine::Options options = toy_options(row.run);
    const auto home = [&](Residence where) {
      return offload::state_homes({.residence = where, .folder = folder, .pin_memory = true});
    };
    if (row.states != Residence::Device) options.zero.home = home(row.states);
    if (row.weights != Residence::Device) options.zero.weight_home = home(row.weights);
    engine::Engine engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()});
    ToyTrained mine;
    const auto all = [&] { mine = train_beside(row, engine, toy, rank, group, folder); };
    stream ? on_a_stream(device, all) : all();
    for (at::Tensor& value : mine.states)
      value = value.cpu();
    if (rank == 0) trained = std::move(mine);
  });
  return trained;
}

TEST(Streams, EnginesOnOneOfTheUsers) {
  const io::TempFolder folder;
  std::vector<Row> rows;
  for (const int world : {1, 2, 4}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const int accumulation : {1, 2}) {
        const ToyRun run{.stage = stage, .accumulation = accumulation, .min_unit = 1};
        for (const auto states : {Residence::Device, Residence::Host, Residence::Nvme}) {
          for (const auto weights : {Residence::Device, Residence::Host, Residence::Nvme}) {
            if (stage == 0 && states != Residence::Device) continue;
            if (stage < 3 && weights != Residence::Device) continue;
            rows.push_back({run, world, states, weights});
            if (states != Residence::Device || weights != Residence::Device) {
              rows.push_back(rows.back());
              rows.back().run.runs_on = true;
            }
            if (stage == 0 || accumulation > 1) continue;
            rows.push_back(rows.back());
            rows.back().run.in_backward = true;
            rows.back().run.clip = 0;
            if (!rows.back().run.runs_on) continue;
            rows.push_back(rows.back());
            rows.back().run.runs_on = false;
          }
        }
      }
    }
  }
  const std::vector<amp::PrecisionPolicy> modes = all_modes();
  // Ranks as threads have a device each: two trainings of two ranks are all four.
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto beside : {Beside::Saves, Beside::Loads, Beside::AnEngine, Beside::AThread}) {
      for (const auto where : {Residence::Device, Residence::Host, Residence::Nvme}) {
        const ToyRun run{.stage = stage, .accumulation = 2, .min_unit = 1, .persistence = 0};
        if (stage > 0 || where == Residence::Device)
          rows.push_back({run, 2, where, stage == 3 ? where : Residence::Device, beside});
        if (stage == 0 || where == Residence::Device) continue;
        rows.push_back(rows.back());
        rows.back().run.runs_on = true;
      }
    }
  }
  for (size_t number = 0; number < rows.size(); ++number) {
    Row& row = rows[number];
    const amp::PrecisionPolicy& precision = modes[number % modes.size()];
    row.run.precision = row.run.in_backward && precision.param == at::kHalf ? modes[2] : precision;
    if (row.run.in_backward) row.run.precision->skip_nonfinite = false;
    Row plain = row;
    plain.beside = Beside::Nothing;
    plain.run.runs_on = false;
    const ToyTrained expected = train(plain, false, folder.path());
    ToyTrained in_thread;
    std::thread thread;
    if (row.beside == Beside::AThread) thread = std::thread([&] { in_thread = train(row, true, folder.path(), 2); });
    expect_same(train(row, true, folder.path()), expected, name(row));
    if (thread.joinable()) {
      thread.join();
      expect_same(in_thread, expected, name(row) + ", in the thread");
    }
    EXPECT_STREQ(tessera_stand_in_races(), "") << name(row);
  }
}

}  // namespace
}  // namespace tessera::testing

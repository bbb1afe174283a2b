// Engines on streams of the user's, alone and with other ranks: the bits of the default stream, and no race.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

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

struct Row {
  ToyRun run;
  int world;
  Residence states = Residence::Device, weights = Residence::Device;
};

std::string name(const Row& row) {
  const ToyRun& run = row.run;
  return "stage " + std::to_string(run.stage) + ", world " + std::to_string(row.world) + ", accumulation " +
         std::to_string(run.accumulation) + (run.in_backward ? ", in the backward" : "") + ", states " +
         std::to_string(static_cast<int>(row.states)) + ", weights " + std::to_string(static_cast<int>(row.weights));
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

ToyTrained train(const Row& row, bool stream, const std::filesystem::path& folder) {
  ToyTrained trained;
  run_ranks(row.world, [&](int rank, const comm::GroupPtr& group) {
    const c10::Device device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(rank));
    Toy toy;
    for (at::Tensor& t : toy.tensors)
      t = t.detach().to(device).requires_grad_(true);
    engine::Options options = toy_options(row.run);
    const auto home = [&](Residence where) {
      return offload::state_homes({.residence = where, .folder = folder, .pin_memory = true});
    };
    if (row.states != Residence::Device) options.zero.home = home(row.states);
    if (row.weights != Residence::Device) options.zero.weight_home = home(row.weights);
    engine::Engine engine(options, comm::Mesh(std::make_shared<StagedGroup>(group)), toy.specs(), {toy_adamw()});
    const auto batch = [&](int of, int number) { return toy_batch(of, number).to(device); };
    ToyTrained mine;
    const auto all = [&] { mine = train_toy(engine, toy, rank, {.batch = batch}); };
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
            if (stage == 0 || accumulation > 1) continue;
            rows.push_back(rows.back());
            rows.back().run.in_backward = true;
            rows.back().run.clip = 0;
          }
        }
      }
    }
  }
  const std::vector<amp::PrecisionPolicy> modes = all_modes();
  for (size_t number = 0; number < rows.size(); ++number) {
    Row& row = rows[number];
    const amp::PrecisionPolicy& precision = modes[number % modes.size()];
    row.run.precision = row.run.in_backward && precision.param == at::kHalf ? modes[2] : precision;
    if (row.run.in_backward) row.run.precision->skip_nonfinite = false;
    const ToyTrained expected = train(row, false, folder.path()), got = train(row, true, folder.path());
    expect_same(got, expected, name(row));
    EXPECT_STREQ(tessera_stand_in_races(), "") << name(row);
  }
}

}  // namespace
}  // namespace tessera::testing

// What a step moves between the device and host memory, on which streams, and what it waits for: docs/devices.md, "What costs what".
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "tessera/engine/engine.h"
#include "tessera/offload/states.h"
#include "tests/stand_in/chain.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

using amp::PrecisionPolicy;
using shard::Residence;

namespace {

constexpr auto kElements = static_cast<double>(Chain::kUnits * Chain::kSize);

// Of a device, bytes of larger copies each way and the streams that were given them.
struct Travel {
  std::atomic<int64_t> up{0}, down{0};  // to the host, to the device
  std::set<c10::StreamId> streams_up, streams_down;
  std::mutex mutex;
} travel;

void note_travel(bool to_host, int64_t bytes) {
  if (bytes < Chain::kSize) return;
  (to_host ? travel.up : travel.down) += bytes;
  const c10::impl::VirtualGuardImpl guard = stand_in_guard();
  const std::scoped_lock lock(travel.mutex);
  (to_host ? travel.streams_up : travel.streams_down).insert(guard.getStream(guard.getDevice()).id());
}

struct TravelRow {
  PrecisionPolicy mode;
  double share;     // of the device, in the update
  double up, down;  // bytes an element, of a step of one micro-batch
  double more;      // bytes of a gradient, which go and come in steps of several
};

std::vector<TravelRow> travel_rows() {
  std::vector<TravelRow> all;
  for (const PrecisionPolicy& mode : all_modes()) {
    const auto grad = static_cast<double>(at::elementSize(mode.grad)),
               weight = static_cast<double>(at::elementSize(mode.param));
    const double master = mode.master == amp::Master::Fp32 && mode.param != at::kFloat ? 4
                          : mode.master == amp::Master::Split                          ? 2
                                                                                       : 0;
    const double states = master + 2 * static_cast<double>(at::elementSize(mode.state));
    for (const double share : {0.0, 0.5, 1.0}) {
      const double x = mode.states_are_narrow() ? 1 : share;
      if (mode.states_are_narrow() && share > 0) continue;
      all.push_back({mode, share, (1 - x) * (grad + weight) + x * states, (1 - x) * weight + x * states, grad});
    }
  }
  return all;
}

}  // namespace

// States and weights once a step, however many micro-batches it has, whenever the update begins and ends. The two ways have
// streams of their own, and the host waits for no copy where the device updates: both ways go on at once.
TEST(Travel, IsThatOfTheTable) {
  static std::atomic<int> waits;
  for (const TravelRow& row : travel_rows()) {
    for (const int micro_batches : {1, 2, 3}) {
      for (const auto& [early, on] : {std::pair(false, false), {false, true}, {true, false}, {true, true}}) {
        if (early && (micro_batches > 1 || row.mode.param == at::kHalf)) continue;
        ToyRun run{.stage = 2,
                   .accumulation = micro_batches,
                   .clip = early ? 0.0 : 1.0,
                   .precision = row.mode,
                   .in_backward = early,
                   .runs_on = on};
        run.precision->skip_nonfinite = row.mode.skip_nonfinite && !early;
        const auto change = [&](engine::Options& options) {
          options.zero.home = offload::state_homes({.residence = Residence::Host, .pin_memory = true});
          options.zero.device_share = row.share;
        };
        const std::string what = std::to_string(row.mode.bytes_per_parameter()) + " bytes, share " +
                                 std::to_string(row.share) + ", " + std::to_string(micro_batches) + " micro-batches" +
                                 (early ? ", early" : "") + (on ? ", running on" : "");
        Chain chain({.run = run, .dtype = row.mode.param, .change = change}, 0, comm::single_group());
        for (int step = 0; step < 2; ++step) {
          travel.up = travel.down = 0;
          travel.streams_up.clear(), travel.streams_down.clear();
          waits = 0;
          tessera_stand_in_on_copy(note_travel);
          tessera_stand_in_on_wait([] { ++waits; });
          for (int micro = 0; micro < micro_batches; ++micro) {
            chain.forward().backward();
            chain.engine->step();
          }
          const int waited = waits;
          chain.engine->finish_update();
          tessera_stand_in_on_copy(nullptr);
          tessera_stand_in_on_wait(nullptr);
          if (step == 0) continue;
          const bool all_through = row.share == 1 || row.mode.states_are_narrow();
          if (all_through) {
            EXPECT_EQ(waited, early ? 0 : 1) << what << ": the norm";
          }
        }
        // In steps of several micro-batches all gradients leave, also those of the device's update; the sum comes back before each
        // further micro-batch, and for the device's update.
        const double x = row.mode.states_are_narrow() ? 1 : row.share;
        const double more = micro_batches > 1 ? (micro_batches - 1 + x) * row.more : 0;
        EXPECT_DOUBLE_EQ(static_cast<double>(travel.up) / kElements, row.up + more) << what;
        EXPECT_DOUBLE_EQ(static_cast<double>(travel.down) / kElements, row.down + more) << what;
        std::vector<c10::StreamId> both;
        std::ranges::set_intersection(travel.streams_up, travel.streams_down, std::back_inserter(both));
        EXPECT_TRUE(both.empty()) << what;
        EXPECT_STREQ(tessera_stand_in_races(), "") << what;
      }
    }
  }
}

// Weights in host memory come a unit ahead of their use, both ways through the model, and one rank's host waits for none.
TEST(Travel, WeightsComeAUnitAhead) {
  static std::string log;  // '<' a unit's copy to the device, its number before it computes, 'w' the host waits
  const auto change = [&](engine::Options& options) {
    options.zero.weight_home = offload::state_homes({.residence = Residence::Host, .pin_memory = true});
  };
  for (const int world : {1, 2}) {
    run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
      Chain chain({.run = {.stage = 3, .persistence = 0, .precision = PrecisionPolicy::bf16()},
                   .dtype = at::kBFloat16,
                   .change = change},
                  rank, group);
      for (int step = 0; step < 3; ++step) {
        group->barrier("before");
        if (rank == 0) {
          log.clear();
          tessera_stand_in_on_copy([](bool to_host, int64_t bytes) {
            if (bytes >= Chain::kSize && !to_host && stand_in_guard().getDevice().index() == 0) log += '<';
          });
          if (world == 1) tessera_stand_in_on_wait([] { log += 'w'; });
        }
        at::Tensor loss = chain.forward([&](int unit) {
          if (rank == 0) log += std::to_string(unit);
        });
        if (rank == 0) log += '|';
        loss.backward();
        group->barrier("after");
        tessera_stand_in_on_copy(nullptr);
        tessera_stand_in_on_wait(nullptr);
        chain.engine->step();
      }
      if (rank == 0) {
        EXPECT_EQ(log, "<<0<1<23|<3<2<10") << world;
      }
    });
  }
}

}  // namespace tessera::testing

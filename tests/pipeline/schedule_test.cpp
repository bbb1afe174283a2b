#include "tessera/pipeline/schedule.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <set>

#include "tests/support/errors.h"

namespace tessera::pipeline {
namespace {

using testing::error_of;

// Runs the tables as stages do: sends never wait, receives take the next message of the sender over that boundary. The number
// of forwards and backwards; negative where nobody can go on, or a message is not the one that is expected.
int play(const std::vector<Table>& tables, const Shape& shape) {
  std::map<std::pair<int, bool>, std::deque<int>> wires;  // boundary, gradients -> micro-batches on their way
  std::vector<size_t> at(shape.stages, 0);
  int done = 0;
  const auto go = [&](int stage) {
    const auto [kind, micro, chunk] = tables[stage][at[stage]];
    const int part = shape.part(stage, chunk);
    const bool gradients = kind == Kind::ReceiveGradients || kind == Kind::SendGradients;
    const bool behind = kind == Kind::SendActivations || kind == Kind::ReceiveGradients;
    auto& wire = wires[{behind ? part : part - 1, gradients}];
    if (kind == Kind::SendActivations || kind == Kind::SendGradients) {
      wire.push_back(micro);
    } else if (kind == Kind::Forward || kind == Kind::Backward) {
      ++done;
    } else if (wire.empty()) {
      return false;
    } else {
      if (wire.front() != micro) done = -1'000'000;
      wire.pop_front();
    }
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int stage = 0; stage < shape.stages; ++stage)
      for (; at[stage] < tables[stage].size() && go(stage); moved = true)
        ++at[stage];
  }
  for (int stage = 0; stage < shape.stages; ++stage)
    if (at[stage] < tables[stage].size()) return -1;
  for (const auto& [place, wire] : wires)
    if (!wire.empty()) return -2;
  return done;
}

// More shapes: tests/python/pipeline/test_schedule.py.
TEST(Schedule, EveryTableComesToItsEndAndHoldsWhatItPromises) {
  const std::vector<std::pair<std::string, int>> cases{{"gpipe", 1}, {"1f1b", 1}, {"gpipe", 2}, {"interleaved", 3}};
  for (const auto& [name, chunks] : cases) {
    for (const int stages : {2, 4}) {
      for (const int micro : {stages, 3 * stages}) {
        const Shape shape{stages, micro, chunks};
        std::vector<Table> tables, evaluations;
        for (int stage = 0; stage < stages; ++stage) {
          tables.push_back(training(name, shape, stage));
          evaluations.push_back(forward_only(shape, stage));
          std::set<std::pair<int, int>> live;
          size_t most = 0;
          for (const Action& action : tables.back()) {
            if (action.kind == Kind::Forward) live.insert({action.micro, action.chunk});
            most = std::max(most, live.size());
            if (action.kind != Kind::Backward) continue;
            EXPECT_EQ(live.erase({action.micro, action.chunk}), 1u);
          }
          EXPECT_EQ(static_cast<int>(most), live_bound(name, shape, stage)) << name << " stage " << stage;
        }
        EXPECT_EQ(play(tables, shape), 2 * stages * chunks * micro) << name;
        EXPECT_EQ(play(evaluations, shape), stages * chunks * micro) << name;
      }
    }
  }
}

TEST(Schedule, OneForwardOneBackward) {
  const Table last{
      {Kind::ReceiveActivations, 0, 0}, {Kind::Forward, 0, 0}, {Kind::Backward, 0, 0}, {Kind::SendGradients, 0, 0},
      {Kind::ReceiveActivations, 1, 0}, {Kind::Forward, 1, 0}, {Kind::Backward, 1, 0}, {Kind::SendGradients, 1, 0}};
  EXPECT_EQ(training("1f1b", {2, 2, 1}, 1), last);
  EXPECT_STREQ(kind_name(Kind::SendGradients), "send gradients");
}

TEST(Schedule, NamesWhatItCannotDo) {
  EXPECT_HAS(error_of([] { training("dual", {2, 4, 1}, 0); }), "no schedule 'dual'");
  EXPECT_HAS(error_of([] { training("interleaved", {2, 4, 1}, 0); }), "needs PipelineModule");
  EXPECT_HAS(error_of([] { training("1f1b", {4, 6, 2}, 0); }), "must be a multiple of 4");
}

}  // namespace
}  // namespace tessera::pipeline

#include "tessera/pipeline/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "tests/support/errors.h"

namespace tessera::pipeline {
namespace {

using testing::error_of;

// Runs the tables as stages do: sends never wait, receives take the next message of the sender. The number of forwards and
// backwards; negative where nobody can go on, or a message is not the one that is expected. `ahead`: a send waits while so many
// messages of its boundary are on their way; 0: never.
int play(const std::vector<Table>& tables, const Shape& shape, int ahead = 0) {
  // sender, receiver, gradients -> the boundaries and micro-batches on their way
  std::map<std::tuple<int, int, bool>, std::deque<std::pair<int, int>>> wires;
  std::vector<size_t> at(shape.stages, 0);
  int done = 0;
  const auto go = [&](int stage) {
    const auto [kind, micro, chunk] = tables[stage][at[stage]];
    if (kind == Kind::Forward || kind == Kind::Backward) {
      ++done;
      return true;
    }
    const bool gradients = kind == Kind::ReceiveGradients || kind == Kind::SendGradients;
    const bool sends = kind == Kind::SendActivations || kind == Kind::SendGradients;
    const int part = shape.part(stage, chunk), other = part + (gradients == sends ? -1 : 1);
    const int there = (other + shape.stages) % shape.stages;
    auto& wire = wires[{sends ? stage : there, sends ? there : stage, gradients}];
    const std::pair<int, int> message{std::min(part, other), micro};
    if (sends) {
      const auto same = [&](const auto& other) { return other.first == message.first; };
      if (ahead > 0 && std::ranges::count_if(wire, same) >= ahead) return false;
      wire.push_back(message);
    } else if (wire.empty()) {
      return false;
    } else {
      if (wire.front() != message) done = -1'000'000;
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

// What the table of one stage promises.
void expect_promises(const std::string& name, const Shape& shape, int stage) {
  std::set<std::pair<int, int>> live;
  size_t most = 0;
  std::vector<int> next(shape.chunks, 0);  // of a chunk, the micro-batch whose backward comes next
  Action last;
  for (const Action& action : training(name, shape, stage)) {
    if (action.kind == Kind::Forward) live.insert({action.micro, action.chunk});
    most = std::max(most, live.size());
    if (action.kind != Kind::Backward) continue;
    EXPECT_EQ(live.erase({action.micro, action.chunk}), 1u);
    EXPECT_EQ(action.micro, next[action.chunk]++) << "gradients add up in the order of the micro-batches";
    last = action;
  }
  EXPECT_TRUE(live.empty()) << "every forward has its backward";
  EXPECT_EQ(static_cast<int>(most), live_bound(name, shape, stage));
  EXPECT_EQ(last, (Action{Kind::Backward, shape.micro_batches - 1, 0}));
}

TEST(Schedule, EveryTableComesToItsEndAndHoldsWhatItPromises) {
  const std::vector<std::pair<std::string, int>> cases{
      {"gpipe", 1}, {"1f1b", 1}, {"gpipe", 2}, {"1f1b", 2}, {"interleaved", 3}};
  for (const auto& [name, chunks] : cases) {
    for (int stages = chunks > 1 ? 2 : 1; stages <= 5; ++stages) {
      for (int micro = 1; micro <= 4 * stages + 4; ++micro) {
        SCOPED_TRACE(name + " stages " + std::to_string(stages) + " micro-batches " + std::to_string(micro));
        const Shape shape{stages, micro, chunks};
        std::vector<Table> tables, evaluations;
        for (int stage = 0; stage < stages; ++stage) {
          evaluations.push_back(forward_only(shape, stage));
          for (const Action& action : evaluations.back())
            EXPECT_LE(action.kind, Kind::SendActivations);
        }
        EXPECT_EQ(play(evaluations, shape), stages * chunks * micro);
        EXPECT_EQ(play(evaluations, shape, kAhead), stages * chunks * micro);
        if (name != "gpipe" && chunks > 1 && micro % stages != 0) continue;
        for (int stage = 0; stage < stages; ++stage) {
          tables.push_back(training(name, shape, stage));
          expect_promises(name, shape, stage);
        }
        EXPECT_EQ(play(tables, shape), 2 * stages * chunks * micro);
      }
    }
  }
}

TEST(Schedule, OneForwardOneBackwardKeepsAsManyAsItIsFarFromTheEnd) {
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(live_bound("1f1b", {4, 16, 1}, stage), 4 - stage);
    EXPECT_EQ(live_bound("gpipe", {4, 16, 1}, stage), 16);
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

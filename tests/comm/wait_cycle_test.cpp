#include "tessera/comm/wait_cycle.h"

#include <map>

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using Graph = std::map<int, std::vector<int>>;

std::vector<int> cycle_of(int start, Graph graph) {
  return find_cycle(start, [&](int node) { return graph[node]; });
}

TEST(WaitCycle, IsFoundThroughTheStartOnly) {
  EXPECT_EQ(cycle_of(0, {}), std::vector<int>{});
  EXPECT_EQ(cycle_of(0, {{0, {1}}, {1, {0}}}), (std::vector<int>{0, 1}));
  EXPECT_EQ(cycle_of(1, {{0, {1}}, {1, {0}}}), (std::vector<int>{1, 0}));
  EXPECT_EQ(cycle_of(0, {{0, {1, 2}}, {1, {3}}, {2, {3}}, {3, {}}}), std::vector<int>{});  // held up, by no cycle
  EXPECT_EQ(cycle_of(0, {{0, {1}}, {1, {2}}, {2, {1}}}), std::vector<int>{});              // by one of others
  EXPECT_EQ(cycle_of(0, {{0, {3, 1}}, {1, {2, 1}}, {2, {0}}, {3, {1}}}), (std::vector<int>{0, 1, 2}));
}

TEST(WaitCycle, EveryRankSaysTheSame) {
  const auto text = cycle_text({{2, "barrier (x, 0 B)"}, {0, "all_reduce (y, 4 B)"}, {1, "barrier (z, 0 B)"}});
  EXPECT_HAS(text,
             "the ranks disagree: rank 0 is in all_reduce (y, 4 B), rank 1 in barrier (z, 0 B), rank 2 in barrier");
  EXPECT_EQ(text, cycle_text({{1, "barrier (z, 0 B)"}, {2, "barrier (x, 0 B)"}, {0, "all_reduce (y, 4 B)"}}));
}

}  // namespace
}  // namespace tessera::comm

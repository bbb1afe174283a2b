#include "tessera/comm/wait_circle.h"

#include <map>

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using Graph = std::map<int, std::vector<int>>;

std::vector<int> circle_of(int start, Graph graph) {
  return find_circle(start, [&](int node) { return graph[node]; });
}

TEST(WaitCircle, IsFoundThroughTheStartOnly) {
  EXPECT_EQ(circle_of(0, {}), std::vector<int>{});
  EXPECT_EQ(circle_of(0, {{0, {1}}, {1, {0}}}), (std::vector<int>{0, 1}));
  EXPECT_EQ(circle_of(1, {{0, {1}}, {1, {0}}}), (std::vector<int>{1, 0}));
  EXPECT_EQ(circle_of(0, {{0, {1, 2}}, {1, {3}}, {2, {3}}, {3, {}}}), std::vector<int>{});  // held up, by no circle
  EXPECT_EQ(circle_of(0, {{0, {1}}, {1, {2}}, {2, {1}}}), std::vector<int>{});              // by one of others
  EXPECT_EQ(circle_of(0, {{0, {3, 1}}, {1, {2, 1}}, {2, {0}}, {3, {1}}}), (std::vector<int>{0, 1, 2}));
}

TEST(WaitCircle, EveryRankSaysTheSame) {
  const auto text = circle_text({{2, "barrier (x, 0 B)"}, {0, "all_reduce (y, 4 B)"}, {1, "barrier (z, 0 B)"}});
  EXPECT_HAS(text,
             "the ranks disagree: rank 0 is in all_reduce (y, 4 B), rank 1 in barrier (z, 0 B), rank 2 in barrier");
  EXPECT_EQ(text, circle_text({{1, "barrier (z, 0 B)"}, {2, "barrier (x, 0 B)"}, {0, "all_reduce (y, 4 B)"}}));
}

}  // namespace
}  // namespace tessera::comm

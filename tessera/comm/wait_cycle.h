// Ranks that wait for each other in a cycle, over calls of different channels (a group and its siblings).
//
// Note [Wait cycles]
//   Rank 0 waits in a call on group A that rank 1 has not made, and rank 1 in a call on group B, a sibling of A, that rank
//   0 has not made. Both wait for ever. It happens where ranks use two siblings in different orders, or one makes a step
//   more. Calls are compared within one channel, and no single one shows a difference.
//   A rank that is blocked waits for all that have not made its call. Such a rank makes it in the thread that uses the
//   channel, as far as is known the one that made its last call there; while that thread is blocked itself, it does
//   not. So a cycle of blocked ranks, each held up by the next, is a proof. A rank that computes, loads data or waits in
//   a group of its own is blocked in nothing here, and one whose other thread uses the channel holds up nobody for sure:
//   neither is in a cycle. Every back end finds cycles in what it knows of the others, once ranks have waited for long.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace tessera::comm {

// A wait of this length looks for a cycle, and counts in those of others.
inline constexpr auto kCycleAfter = std::chrono::seconds(1);

// The nodes of a cycle, beginning with `start`, each held up by the one after it and the last by the first. Empty when
// there is none through `start`. `next(node)`: those that hold up a node.
template <class Node, class Next>
std::vector<Node> find_cycle(const Node& start, const Next& next) {
  std::vector<Node> path = {start}, seen;
  std::vector<std::vector<Node>> open = {next(start)};
  while (!path.empty()) {
    if (open.back().empty()) {
      path.pop_back();
      open.pop_back();
      continue;
    }
    const Node node = open.back().back();
    open.back().pop_back();
    if (node == start) return path;
    if (std::find(seen.begin(), seen.end(), node) != seen.end()) continue;
    seen.push_back(node);
    path.push_back(node);
    open.push_back(next(node));
  }
  return {};
}

// "the ranks disagree: rank 0 is in <a>, rank 1 in <b>, and each waits for ...": equal for every rank of the cycle.
// `waits`: ranks and describe() of the calls that they are blocked in.
std::string cycle_text(std::vector<std::pair<int, std::string>> waits);

}  // namespace tessera::comm

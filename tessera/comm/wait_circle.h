// Ranks that wait for each other in a circle, over calls of different channels (a group and its siblings).
//
// Note [Waiting in a circle]
//   Calls are compared within one channel. Ranks that use two siblings in different orders, or one of which makes a step
//   more, may call nothing different in any of them: one is blocked in a call of the first that another has not made, and
//   that one in a call of the second that the first has not made. All of them wait for ever.
//   A rank that is blocked waits for all that have not made its call. Such a rank makes it in the thread that uses the
//   channel, as far as can be told the one that made its last call there; while that thread is blocked itself, it does
//   not. So a circle of blocked ranks, each held up by the next, is a proof. A rank that computes, loads data or waits in
//   a group of its own is blocked in nothing here, and one whose other thread uses the channel holds up nobody for sure:
//   neither is in a circle. Every back end finds circles in what it knows of the others, once ranks have waited for long.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace tessera::comm {

// A wait of this length looks for a circle, and counts in those of others.
inline constexpr auto kCircleAfter = std::chrono::seconds(1);

// The nodes of a circle, beginning with `start`, each held up by the one after it and the last by the first. Empty when
// there is none through `start`. `next(node)`: those that hold up a node.
template <class Node, class Next>
std::vector<Node> find_circle(const Node& start, const Next& next) {
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

// "the ranks disagree: rank 0 is in <a>, rank 1 in <b>, and each waits for ...": equal for every rank of the circle.
// `waits`: ranks and describe() of the calls that they are blocked in.
std::string circle_text(std::vector<std::pair<int, std::string>> waits);

}  // namespace tessera::comm

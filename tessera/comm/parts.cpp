#include "tessera/comm/parts.h"

#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"

namespace tessera::comm {

int Parts::rank_of(int of_part, int place) const {
  if (!firsts.empty()) return firsts.at(of_part) + place;
  for (int p = 0; p < of_part; ++p)
    place += shapes[p].size(kAxes);
  return place;
}

int Parts::place() const {
  return everyone->rank() - rank_of(part, 0);
}

namespace {

// The meshes of all places of a part whose ranks are threads.
std::vector<Mesh> thread_meshes(const MeshShape& shape, std::chrono::milliseconds timeout) {
  std::map<std::vector<int>, std::vector<GroupPtr>> groups;  // by their ranks
  std::vector<Mesh> meshes(shape.size(kAxes));
  for (int place = 0; place < static_cast<int>(meshes.size()); ++place) {
    for (const Axes axes : shape.groups()) {
      const std::vector<int> ranks = shape.ranks_along(axes, place);
      auto& group = groups[ranks];
      if (group.empty()) group = thread_groups(static_cast<int>(ranks.size()), timeout);
      meshes[place].set(axes, group[std::find(ranks.begin(), ranks.end(), place) - ranks.begin()]);
    }
  }
  return meshes;
}

std::vector<PointToPointPtr> p2p_of(int world, std::chrono::milliseconds timeout) {
  return world > 1 ? thread_point_to_point(world, timeout) : std::vector<PointToPointPtr>(1);
}

}  // namespace

std::vector<Parts> thread_parts(const std::vector<MeshShape>& shapes, std::chrono::milliseconds timeout) {
  int world = 0;
  for (const MeshShape& shape : shapes)
    world += shape.size(kAxes);
  const auto everyone = thread_groups(world, timeout);
  const auto p2p = p2p_of(world, timeout);
  std::vector<Parts> all;
  for (int part = 0; part < static_cast<int>(shapes.size()); ++part)
    for (Mesh& mesh : thread_meshes(shapes[part], timeout))
      all.push_back({shapes, part, std::move(mesh), everyone[all.size()], p2p[all.size()]});
  return all;
}

std::vector<int> check_overlaid(const std::vector<MeshShape>& shapes, const std::vector<int>& firsts, int world) {
  TESSERA_CHECK_VALUE(firsts.empty() || firsts.size() == shapes.size(), "comm", "there are ", shapes.size(),
                      " parts, and first ranks of ", firsts.size());
  std::vector<bool> taken(world, false);
  for (size_t p = 0; p < shapes.size(); ++p) {
    const int size = shapes[p].size(kAxes), first = firsts.empty() ? 0 : firsts[p];
    TESSERA_CHECK_VALUE(!firsts.empty() || size == world, "comm", "parts that all ranks have must have ", world,
                        " ranks each, got one of ", size, "; say the first rank of each part where some have fewer");
    TESSERA_CHECK_VALUE(first >= 0 && first <= world - size, "comm", "part ", p, " has ", size, " ranks from ", first,
                        " on, and the program has ", world);
    std::fill_n(taken.begin() + first, size, true);
  }
  const auto free = std::ranges::find(taken, false);
  TESSERA_CHECK_VALUE(free == taken.end(), "comm", "rank ", free - taken.begin(), " is of no part");
  return firsts.empty() ? std::vector<int>(shapes.size(), 0) : firsts;
}

std::vector<std::vector<Parts>> thread_overlaid_parts(const std::vector<MeshShape>& shapes,
                                                      const std::vector<int>& given,
                                                      std::chrono::milliseconds timeout) {
  TESSERA_CHECK_VALUE(!shapes.empty(), "comm", "a program needs a part");
  int world = shapes[0].size(kAxes);
  for (size_t p = 0; p < std::min(given.size(), shapes.size()); ++p)
    world = std::max(world, given[p] + shapes[p].size(kAxes));
  const std::vector<int> firsts = check_overlaid(shapes, given, world);
  const auto everyone = thread_groups(world, timeout);
  const auto p2p = p2p_of(world, timeout);
  std::vector<std::vector<Parts>> all(world);
  for (int part = 0; part < static_cast<int>(shapes.size()); ++part) {
    auto meshes = thread_meshes(shapes[part], timeout);
    for (size_t place = 0; place < meshes.size(); ++place) {
      const int rank = firsts[part] + static_cast<int>(place);
      all[rank].push_back({shapes, part, std::move(meshes[place]), everyone[rank], p2p[rank], firsts});
    }
  }
  return all;
}

}  // namespace tessera::comm

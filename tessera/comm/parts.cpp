#include "tessera/comm/parts.h"

#include <algorithm>
#include <map>

#include "tessera/comm/backends.h"

namespace tessera::comm {

int Parts::rank_of(int of_part, int place) const {
  for (int p = 0; p < of_part; ++p)
    place += shapes[p].size(kAxes);
  return place;
}

int Parts::place() const {
  return everyone->rank() - rank_of(part, 0);
}

std::vector<Parts> thread_parts(const std::vector<MeshShape>& shapes, std::chrono::milliseconds timeout) {
  int world = 0;
  for (const MeshShape& shape : shapes)
    world += shape.size(kAxes);
  const auto everyone = thread_groups(world, timeout);
  const auto posts = world > 1 ? thread_posts(world, timeout) : std::vector<PostPtr>(1);
  std::vector<Parts> all;
  for (int part = 0; part < static_cast<int>(shapes.size()); ++part) {
    const MeshShape& shape = shapes[part];
    std::map<std::vector<int>, std::vector<GroupPtr>> groups;  // by their ranks
    for (int place = 0; place < shape.size(kAxes); ++place) {
      Parts mine{shapes, part, Mesh(), everyone[all.size()], posts[all.size()]};
      for (const Axes axes : shape.groups()) {
        const std::vector<int> ranks = shape.ranks_along(axes, place);
        auto& group = groups[ranks];
        if (group.empty()) group = thread_groups(static_cast<int>(ranks.size()), timeout);
        mine.mesh.set(axes, group[std::find(ranks.begin(), ranks.end(), place) - ranks.begin()]);
      }
      all.push_back(std::move(mine));
    }
  }
  return all;
}

}  // namespace tessera::comm

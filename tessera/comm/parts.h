// The ranks of a program that has several engines, each on ranks of its own: stages of a pipeline, ends of a link.
#pragma once

#include <chrono>
#include <vector>

#include "tessera/comm/mesh.h"
#include "tessera/comm/point_to_point.h"

namespace tessera::comm {

// Part p has as many ranks as its mesh has: those behind the ranks of parts 0 to p-1, or those from firsts[p] on, which may be
// of other parts, too.
struct Parts {
  std::vector<MeshShape> shapes;  // of all parts
  int part = 0;                   // this rank's
  Mesh mesh;                      // of this rank's part
  GroupPtr everyone;              // all ranks of all parts
  PointToPointPtr p2p;            // between all ranks; null where there is one rank
  std::vector<int> firsts = {};   // where parts lie over each other: the first rank of each

  int rank_of(int of_part, int place) const;  // the rank's number among all
  int place() const;                          // this rank's place in its part
};

// The ranks of the environment (see environment_group() in backends.h) as such parts. Collective. Value error where the ranks of
// all parts are not as many as WORLD_SIZE.
Parts environment_parts(const std::vector<MeshShape>& shapes,
                        std::chrono::milliseconds timeout = std::chrono::minutes(10));

// Does so where parts lie over each other: part p has the ranks from firsts[p] on; without `firsts` every part has all of them.
// Returns how this rank sees the program as one of each part that it is of, in their order. Value error where a part reaches past
// the ranks, or a rank is of no part.
std::vector<Parts> environment_overlaid_parts(const std::vector<MeshShape>& shapes, const std::vector<int>& firsts = {},
                                              std::chrono::milliseconds timeout = std::chrono::minutes(10));

// How many ranks the environment has; this process's number among all of them, and among those of its host. Local. Value error where
// the environment is impossible.
int environment_size();
int environment_rank();
int environment_local_rank();
// This rank's device, where its model and inputs belong: Note [Devices of ranks] in c10d/devices.h; the CPU where torch has none.
// It is torch's current device from here on. Local.
c10::Device environment_device();

// Returns the first rank of each part; throws what is wrong with them.
std::vector<int> check_overlaid(const std::vector<MeshShape>& shapes, const std::vector<int>& firsts, int world);

// Parts of ranks that are threads of this process: element r is for the thread of rank r.
std::vector<Parts> thread_parts(const std::vector<MeshShape>& shapes,
                                std::chrono::milliseconds timeout = std::chrono::minutes(10));
// Element r: what environment_overlaid_parts() gives rank r of a program that ends with the last part's ranks.
std::vector<std::vector<Parts>> thread_overlaid_parts(const std::vector<MeshShape>& shapes,
                                                      const std::vector<int>& firsts = {},
                                                      std::chrono::milliseconds timeout = std::chrono::minutes(10));

}  // namespace tessera::comm

// Factories of the group back ends.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/mesh.h"

namespace c10d {
class ProcessGroup;
}

namespace tessera::comm {

// One rank; every collective is a copy at most.
GroupPtr single_group();

// `size` ranks that are threads of this process (tests, small experiments). Element r is for the
// thread of rank r. A rank that throws calls abort(); the others then fail with its reason at once.
// `timeout`: longest wait for a peer.
std::vector<GroupPtr> thread_groups(int size, std::chrono::milliseconds timeout = std::chrono::minutes(10));

// The ranks of a torch process group registered under `name` (the default group of torch.distributed
// is "0"; Python's ProcessGroup.group_name gives it): over that group, or over shared memory for CPU tensors that the group
// would carry by Gloo, see Note [Choice of transport] in c10d/transport.h. Collective. Value error when no such group is
// registered.
GroupPtr c10d_group(const std::string& name);
// How a front end holds a process group: the object that this returns lets go of it. Empty: held as any object.
using HoldProcessGroup =
    std::function<std::shared_ptr<c10d::ProcessGroup>(c10::intrusive_ptr<c10d::ProcessGroup> group)>;
// The ranks of a process group at hand; `hold` is for the groups of siblings too.
GroupPtr c10d_group(const HoldProcessGroup& hold, c10d::ProcessGroup& group);

// The world group of this process from the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as tessera-run and torchrun
// set them, or what mpirun, mpiexec and srun set, see Note [Who started this process] in launch.h. One rank: single_group().
// Else shared memory or Gloo over TCPStore, see Note [Choice of transport] in c10d/transport.h. Collective: returns when all
// ranks have met, or throws DistBackendError after `timeout`. Value error where the environment is impossible. With several
// ranks SIGPIPE is ignored from here on, unless the program handles it.
GroupPtr environment_group(std::chrono::milliseconds timeout = std::chrono::minutes(10));

// The ranks of the environment on the axes of a mesh, see mesh_shape(). Collective. Value error where the numbers do not divide
// the number of ranks.
Mesh environment_mesh(int shards, int sp = 1, int tp = 1, std::chrono::milliseconds timeout = std::chrono::minutes(10));

// Ranks of the environment on any axes, with so many along each; dp_shard has the rest where it is not named. Neighbours along
// the last axis have consecutive ranks. Collective. Value error when the product is not WORLD_SIZE, or does not divide it.
Mesh environment_mesh(const std::map<Axis, int>& sizes, std::chrono::milliseconds timeout = std::chrono::minutes(10));

}  // namespace tessera::comm

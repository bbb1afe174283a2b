// c10d_group() with the choice of path left open; users call the functions of backends.h.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "tessera/comm/backends.h"

namespace tessera::comm {

enum class C10dPath {
  // Messages between pairs of ranks and our own sums for CPU tensors, native collectives for others. The second round of a
  // large all_reduce or broadcast leaves in wait(): ranks wait for those of a group and of its siblings in one order.
  ByDevice,
  Native,  // always the native collectives (their order of summation and rounding)
};

// Whether make_c10d_group() has made the group, and it takes tensors of devices.
bool is_c10d_group(const Group& group);

// `host`: carries the CPU tensors, if given.
GroupPtr make_c10d_group(const HoldProcessGroup& hold, c10::intrusive_ptr<c10d::ProcessGroup> group, C10dPath path,
                         GroupPtr host = nullptr);

}  // namespace tessera::comm

#include "tessera/comm/mesh.h"

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"

namespace tessera::comm {

const char* axis_name(Axis axis) {
  switch (axis) {
    case Axis::DpReplicate:
      return "dp_replicate";
    case Axis::DpShard:
      return "dp_shard";
    case Axis::Sp:
      return "sp";
    case Axis::Tp:
      return "tp";
  }
  return "?";
}

Mesh::Mesh() {
  for (const Axis axis : {Axis::DpReplicate, Axis::DpShard, Axis::Sp, Axis::Tp}) {
    groups_[axis] = single_group();
  }
}

Mesh::Mesh(GroupPtr dp_shard) : Mesh() {
  set(Axis::DpShard, std::move(dp_shard));
}

Mesh& Mesh::set(Axis axis, GroupPtr group) {
  TESSERA_CHECK_VALUE(group != nullptr, "comm.mesh", "the group of axis '", axis_name(axis), "' is null");
  groups_[axis] = std::move(group);
  return *this;
}

const GroupPtr& Mesh::group(Axis axis) const {
  return groups_.at(axis);
}

}  // namespace tessera::comm

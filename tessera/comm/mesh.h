// Mesh: the groups of one rank, one per named axis. "axis" is for meshes; "dim" is for tensors.
#pragma once

#include <map>
#include <string>

#include "tessera/comm/group.h"

namespace tessera::comm {

enum class Axis { DpReplicate, DpShard, Sp, Tp };
const char* axis_name(Axis axis);

// Groups are handed in; an axis that is not set has one rank. Immutable once built.
class Mesh {
 public:
  Mesh();
  explicit Mesh(GroupPtr dp_shard);
  // Value error when `group` is null.
  Mesh& set(Axis axis, GroupPtr group);

  // The group along `axis`; a single_group() of this mesh when it was not set.
  const GroupPtr& group(Axis axis) const;
  int size(Axis axis) const { return group(axis)->size(); }
  int rank(Axis axis) const { return group(axis)->rank(); }
  // Data-parallel ranks over both axes, and this one among them: replica by replica.
  int dp_size() const { return size(Axis::DpReplicate) * size(Axis::DpShard); }
  int dp_rank() const { return rank(Axis::DpReplicate) * size(Axis::DpShard) + rank(Axis::DpShard); }

 private:
  std::map<Axis, GroupPtr> groups_;
};

}  // namespace tessera::comm

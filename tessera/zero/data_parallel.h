// The data-parallel ranks of an engine on two axes of the mesh: model states are sharded along one and replicated along
// the other (hybrid sharding). With one replica, or one rank to a replica, that group is a single one and costs nothing.
#pragma once

#include "tessera/comm/mesh.h"

namespace tessera::zero {

struct DataParallel {
  comm::GroupPtr shard, replicate;

  explicit DataParallel(comm::GroupPtr shard_group);
  explicit DataParallel(const comm::Mesh& mesh);

  // Ranks in all, and this one's place: replica by replica.
  int size() const { return shard->size() * replicate->size(); }
  int rank() const { return replicate->rank() * shard->size() + shard->rank(); }

  // Over all ranks; collective; return when done. `root` counts as rank() does.
  void all_reduce(const at::Tensor& tensor, comm::ReduceOp op, comm::Label label) const;
  void broadcast(const at::Tensor& tensor, int root, comm::Label label) const;
};

}  // namespace tessera::zero

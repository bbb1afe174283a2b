// The data-parallel ranks of an engine on two axes of the mesh: model states are sharded along one and replicated along
// the other (hybrid sharding). With one replica, or one rank to a replica, that group is a single one and costs nothing.
#pragma once

#include "tessera/comm/mesh.h"

namespace tessera::zero {

struct DataParallel {
  comm::GroupPtr shard, replicate;
  // Of the model. The groups may take tensors of this device only, as NCCL's do.
  c10::Device device = at::kCPU;

  explicit DataParallel(comm::GroupPtr shard_group);
  explicit DataParallel(const comm::Mesh& mesh);

  // Ranks in all, and this one's place: replica by replica.
  int size() const { return shard->size() * replicate->size(); }
  int rank() const { return replicate->rank() * shard->size() + shard->rank(); }

  // Over all ranks; collective; return when done. `root` counts as rank() does.
  void all_reduce(const at::Tensor& tensor, comm::ReduceOp op, comm::Label label) const;
  void broadcast(const at::Tensor& tensor, int root, comm::Label label) const;

  // What ranks tell each other: numbers in CPU tensors, which travel by way of the device. Collective; return when done.
  void agree(const at::Tensor& numbers, comm::ReduceOp op, comm::Label label) const;
  // Every rank of the shard group fills its row of `rows` (a row for each of them) and gets those of the others, each
  // number the largest that a replica has.
  void collect(const at::Tensor& rows, comm::Label label) const;
};

}  // namespace tessera::zero

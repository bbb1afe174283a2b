#include "tessera/zero/data_parallel.h"

#include "tessera/comm/backends.h"

namespace tessera::zero {

DataParallel::DataParallel(comm::GroupPtr shard_group)
    : shard(std::move(shard_group)), replicate(comm::single_group()) {}

DataParallel::DataParallel(const comm::Mesh& mesh)
    : shard(mesh.group(comm::Axis::DpShard)), replicate(mesh.group(comm::Axis::DpReplicate)) {}

void DataParallel::all_reduce(const at::Tensor& tensor, comm::ReduceOp op, comm::Label label) const {
  shard->all_reduce(tensor, op, label).wait();
  replicate->all_reduce(tensor, op, label).wait();
}

// First every replica agrees within itself, then the replicas with that of the root: right for any root, since what the
// other replicas sent themselves is overwritten.
void DataParallel::broadcast(const at::Tensor& tensor, int root, comm::Label label) const {
  shard->broadcast(tensor, root % shard->size(), label).wait();
  replicate->broadcast(tensor, root / shard->size(), label).wait();
}

}  // namespace tessera::zero

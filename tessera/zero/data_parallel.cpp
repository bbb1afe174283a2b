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

void DataParallel::agree(const at::Tensor& numbers, comm::ReduceOp op, comm::Label label) const {
  const at::Tensor travelling = numbers.to(device);
  all_reduce(travelling, op, label);
  if (!device.is_cpu()) numbers.copy_(travelling);
}

void DataParallel::collect(const at::Tensor& rows, comm::Label label) const {
  const at::Tensor travelling = rows.to(device);
  shard->all_gather(travelling.flatten(), travelling[shard->rank()].flatten(), label).wait();
  if (replicate->size() > 1) replicate->all_reduce(travelling.flatten(), comm::ReduceOp::Max, label).wait();
  if (!device.is_cpu()) rows.copy_(travelling);
}

}  // namespace tessera::zero

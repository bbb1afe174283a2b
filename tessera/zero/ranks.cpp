#include "tessera/zero/ranks.h"

#include "tessera/comm/backends.h"

namespace tessera::zero {

Ranks::Ranks(comm::GroupPtr shard_group)
    : shard(std::move(shard_group)), replicate(comm::single_group()), model(comm::single_group()) {}

Ranks::Ranks(const comm::Mesh& mesh, comm::Axes varies)
    : shard(mesh.group(comm::kStateAxes.without(varies))),
      replicate(mesh.group(comm::Axes(comm::Axis::DpReplicate).without(varies))),
      model(mesh.group(comm::kModelAxes)),
      varies_along_model(varies.has(comm::Axis::Tp)) {}

Ranks Ranks::siblings() const {
  Ranks own = *this;
  for (comm::GroupPtr* group : {&own.shard, &own.replicate, &own.model})
    if ((*group)->size() > 1) *group = (*group)->sibling();
  return own;
}

// First every replica agrees within itself, then the replicas with that of the root, then the slices of the model with the
// first: right for any root, since what the others sent themselves is overwritten.
void Ranks::broadcast(const at::Tensor& tensor, int root, comm::Label label) const {
  shard->broadcast(tensor, root % shard->size(), label).wait();
  replicate->broadcast(tensor, root / shard->size(), label).wait();
  if (!varies_along_model) model->broadcast(tensor, 0, label).wait();
}

void Ranks::agree(const at::Tensor& numbers, comm::ReduceOp op, comm::Label label) const {
  const at::Tensor travelling = numbers.to(device);
  for (const comm::GroupPtr& group : {shard, replicate, model})
    group->all_reduce(travelling, op, label).wait();
  if (!device.is_cpu()) numbers.copy_(travelling);
}

void Ranks::collect(const at::Tensor& rows, comm::Label label) const {
  const at::Tensor travelling = rows.to(device);
  shard->all_gather(travelling.flatten(), travelling[shard->rank()].flatten(), label).wait();
  for (const comm::GroupPtr& group : {replicate, model})
    if (group->size() > 1) group->all_reduce(travelling.flatten(), comm::ReduceOp::Max, label).wait();
  if (!device.is_cpu()) rows.copy_(travelling);
}

}  // namespace tessera::zero

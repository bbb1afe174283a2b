// The ranks of an engine by what they share; see Note [Batch, state and model ranks] in comm/mesh.h.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/mesh.h"

namespace tessera::zero {

// Example: 2 replicas of 3 shards: rank 4 of the 6 is number 1 of its shard group and number 1 of its replicate group, and
// is rank 4 here, replica by replica. With one replica, or one rank to a replica, that group is a single one and costs
// nothing.
struct Ranks {
  comm::GroupPtr shard;             // states are cut along it
  comm::GroupPtr replicate;         // ranks with equal states: hybrid sharding
  comm::GroupPtr model;             // other slices of the model
  bool varies_along_model = false;  // values are not the same along `model`
  // The model's device. The groups may take tensors of this device only, as NCCL's do.
  c10::Device device = at::kCPU;

  explicit Ranks(comm::GroupPtr shard_group);
  // `varies`: the axes along which a parameter differs (a slice of another rank's, or an expert of its own). Gradients
  // and values of it are not exchanged along these axes.
  explicit Ranks(const comm::Mesh& mesh, comm::Axes varies = {});
  // Returns the same ranks in groups of their own for tensors of `device` (comm::Group::sibling). Collective.
  Ranks siblings() const;

  // Ranks that exchange gradients: how many, and this one's number among them, replica by replica.
  int size() const { return shard->size() * replicate->size(); }
  int rank() const { return replicate->rank() * shard->size() + shard->rank(); }
  // Ranks that exchange gradients or lie along the model, whether or not their values differ: how many, and this one's number.
  int all() const { return size() * model->size(); }
  int place() const { return rank() * model->size() + model->rank(); }

  // One rank's values for all ranks that have the same. Collective; returns when done. `root` counts as rank() does.
  void broadcast(const at::Tensor& tensor, int root, comm::Label label) const;

  // Reduces numbers that ranks exchange, along all three groups: CPU tensors, which travel by way of the device. Collective;
  // returns when done.
  void agree(const at::Tensor& numbers, comm::ReduceOp op, comm::Label label) const;
  // Returns all ranks' numbers, by place(): `mine`, and behind them `computed` (0-d, double), which may be on the device. Every
  // rank gives as many. Makes one collective along each group of several ranks and one wait for the device. Returns when done.
  std::vector<std::vector<double>> gather(std::vector<double> mine, const std::vector<at::Tensor>& computed,
                                          comm::Label label) const;
  // Returns the texts of all ranks, by place(). Collective; returns when done.
  std::vector<std::string> gather_text(const std::string& text, comm::Label label) const;
};

// The values of `root` (as in Ranks::broadcast) into every rank's `tensors`, in place: their own words, of any dtype, in one
// collective. The tensors are strided, and of the same sizes and dtypes on all ranks. Collective; returns when done.
void broadcast_words(const Ranks& ranks, const std::vector<at::Tensor>& tensors, int root, comm::Label label);

}  // namespace tessera::zero

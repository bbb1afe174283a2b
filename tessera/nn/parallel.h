// Layers of torch::nn whose weight is cut over the ranks of a tensor-parallel group: the same names, arguments, parameters and
// results, but this rank's slices. On a group of one rank they are the whole layers.
//
//   const comm::Mesh mesh = comm::environment_mesh({{comm::Axis::DpShard, 2}, {comm::Axis::Tp, 2}});
//   parallel::Region region{mesh.group(comm::Axis::Tp)};
//   up = register_module("up", tessera::nn::ColumnLinear(torch::nn::LinearOptions(width, 4 * width), region));
//   down = register_module("down", tessera::nn::RowLinear(torch::nn::LinearOptions(4 * width, width), region));
//   auto engine = tessera::initialize(model, config, mesh);
//
// For attention over a cut sequence: parallel::SequenceAttention (parallel/attention.h).
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/embedding.h>
#include <torch/nn/options/linear.h>
#include <torch/nn/pimpl.h>

#include <map>
#include <string>

#include "tessera/engine/engine.h"
#include "tessera/parallel/layers.h"
#include "tessera/shard/cut.h"

namespace tessera::nn {

// Base of modules with parameters that are slices: tells engines which elements of the whole they are.
class CutHolder {
 public:
  virtual ~CutHolder() = default;
  // Cuts by the parameter's own name. Empty on a group of one rank.
  const std::map<std::string, shard::CutPtr>& cuts() const { return cuts_; }

 protected:
  std::map<std::string, shard::CutPtr> cuts_;
};

// y = x W^T + b with this rank's outputs. Sub-parameters of a packed layer (query, key, value) are cut one by one, `subs` being
// their outputs; empty: one sub-parameter. Cuts are by whole heads where `rule` says so.
class ColumnLinearImpl : public torch::nn::Cloneable<ColumnLinearImpl>, public CutHolder {
 public:
  ColumnLinearImpl(const torch::nn::LinearOptions& options, parallel::Region region, const parallel::Sizes& subs = {},
                   parallel::SizeRule rule = {});
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LinearOptions options;  // of the whole layer
  at::Tensor weight, bias;           // slices; bias undefined without one

 private:
  parallel::Region region_;
  parallel::Ranges ranges_;  // this rank's outputs
};
TORCH_MODULE(ColumnLinear);

// y = the sum over the ranks of x W^T, + b, with this rank's inputs: those of a column layer of the same `subs` and `rule`.
class RowLinearImpl : public torch::nn::Cloneable<RowLinearImpl>, public CutHolder {
 public:
  RowLinearImpl(const torch::nn::LinearOptions& options, parallel::Region region, const parallel::Sizes& subs = {},
                parallel::SizeRule rule = {});
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LinearOptions options;
  at::Tensor weight, bias;  // weight: columns; bias: whole

 private:
  parallel::Region region_;
  parallel::Ranges ranges_;
};
TORCH_MODULE(RowLinear);

// An embedding with this rank's rows of the vocabulary. It serves the option padding_idx; not-implemented error for others.
class VocabEmbeddingImpl : public torch::nn::Cloneable<VocabEmbeddingImpl>, public CutHolder {
 public:
  VocabEmbeddingImpl(const torch::nn::EmbeddingOptions& options, parallel::Region region, parallel::SizeRule rule = {});
  void reset() override;
  at::Tensor forward(const at::Tensor& indices);

  torch::nn::EmbeddingOptions options;
  at::Tensor weight;

 private:
  parallel::Region region_;
  parallel::Ranges ranges_;
};
TORCH_MODULE(VocabEmbedding);

// The cut of parameter `name` (a path) of `module`; null where it is whole.
shard::CutPtr cut_of(const torch::nn::Module& module, const std::string& name);
// Sizes of the whole.
parallel::Sizes whole_sizes(const torch::nn::Module& module, const std::string& name);
// Copies this rank's elements of a whole value into the parameter, without autograd. Value error for other sizes than the whole's.
void set_whole(torch::nn::Module& module, const std::string& name, const at::Tensor& whole);

// Marks in `specs` (param_specs of the same module) which parameters are slices, of what, and that they differ along tp.
void mark_cuts(const torch::nn::Module& module, std::vector<engine::ParamSpec>& specs);

}  // namespace tessera::nn

// Whole parameters inside regions of a model that is cut.
//
// Note [Whole parameters in regions]
//   A whole parameter between a column layer and the next row layer (a learned activation, a norm of one head, a gain) works on
//   this rank's slice: its gradient is a term of a sum over the ranks. One before or after is not, and names do not tell them apart.
//   The autograd graph does: what is reached from the input of a row layer without going through a column layer is inside. So each
//   row layer looks there once, in its first forward with gradients (a replay counts), and gradients of what it finds are summed
//   from that backward on. What cannot be right is an error: the weight of a layer that is cut and used without a call of it, and
//   activations that come in beside the column layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

namespace tessera::parallel {

// A parameter of a model that is cut, which a row layer may find in the graph of its input.
struct RegionParam {
  std::string name;
  at::Tensor param;
  bool settled = false;    // it is cut, or its gradient is a sum over the ranks already
  std::string layer = {};  // the path of the column or row layer whose call must use it; empty: any operator may
};

// Which of `params`, by their numbers, must have their gradients summed over the ranks: the row layer `path` gets this rank's slice
// `x`, which depends on them. `lists`: paths of lists of blocks. Value and usage errors name the layer. Local.
std::vector<size_t> whole_inside(const std::string& path, const at::Tensor& x, std::span<const RegionParam> params,
                                 std::span<const std::string> lists);

// The usage error of a weight of the layer `path` that is used without a call of the layer.
[[noreturn]] void refuse_weight_alone(const std::string& path);

// `t`, with a node in its graph at which regions begin: what is made of it is for this rank's slices.
at::Tensor border(const at::Tensor& t);

}  // namespace tessera::parallel

// Whole parameters inside regions of a model that is cut.
//
// Note [Whole parameters in regions]
//   A whole parameter between a column layer and the next row layer (a learned activation, a norm of one head, a gain) works on
//   this rank's slice: its gradient is a term of a sum over the ranks. One before or after is not, and names do not tell them apart.
//   The autograd graph does: what is reached from the input of a row layer without going through a column layer is inside. So each
//   row layer looks there once, in its first forward with gradients, and gradients of what it finds are summed from that backward
//   on. Activations that come in beside column layers are an error. (Python: python/tessera/parallel/_inside.py.)
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::nn {

// What one model's row layers share. It holds no parameter; each parameter holds it.
class Inside {
 public:
  // `lists`: paths of lists of blocks.
  Inside(const torch::nn::Module& module, std::vector<std::string> lists, comm::GroupPtr group);

  // Makes the gradient of `param` the sum over the ranks from now on. Once.
  void sum_gradient(const at::Tensor& param);
  // `x` comes into the row layer `path`: value error, which names the layer, where gradients would be parts of the true ones.
  void look(const std::string& path, const at::Tensor& x);

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Known {
    std::string name;
    WeakTensor param;
  };
  struct Found {
    std::vector<std::pair<std::string, at::Tensor>> params;
    bool beside = false;  // something whole comes in
  };
  Found reached(const at::Tensor& x) const;
  std::string block_of(const std::string& path) const;

  std::vector<Known> params_;
  std::vector<std::string> lists_;
  comm::GroupPtr group_;
  std::unordered_set<const void*> summed_;
  std::set<std::string> seen_;
};

}  // namespace tessera::nn

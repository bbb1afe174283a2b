// Whole parameters of a model that is cut whose gradients are sums over the ranks: those that a rule names, and those that are found
// inside a region (Note [Whole parameters in regions] in tessera/parallel/inside.h).
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
class SummedParams {
 public:
  // `lists`: paths of lists of blocks.
  SummedParams(const torch::nn::Module& module, std::vector<std::string> lists, comm::GroupPtr group);

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

  std::vector<Known> params_;
  std::vector<std::string> lists_;
  comm::GroupPtr group_;
  std::unordered_set<const void*> summed_;
  std::set<std::string> seen_;
};

}  // namespace tessera::nn

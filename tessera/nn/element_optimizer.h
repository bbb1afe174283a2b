// ElementOptimizer: optimizers of torch.optim that LibTorch has not and no kernel is for (NAdam, RAdam, Adamax, Adadelta, ASGD,
// Rprop), with torch's arithmetic and names of states, as an optimizer of torch for ClientOptimizer. They update element by element.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "tessera/nn/whole_optimizer.h"

namespace tessera::nn {

class ElementOptimizer final : public torch::optim::Optimizer {
 public:
  using Options = WholeOptimizer::Options;
  using State = WholeOptimizer::State;

  // `type`: a row of optim::find_torch_type() that is_made_here(). Groups have Options.
  ElementOptimizer(const optim::Type& type, const std::vector<torch::optim::OptimizerParamGroup>& groups);
  static bool is_made_here(const optim::Type& type);

  // Not-implemented error for a closure.
  at::Tensor step(LossClosure closure = nullptr) override;
  // Loads the states alone. IoError for those of another optimizer.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  const optim::Type& type_;
};

}  // namespace tessera::nn

// OwnGroups: what a program adds to the param groups of an optimizer that it has given to an engine.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

namespace tessera::nn {

class OwnGroups {
 public:
  struct Added {
    int group;
    std::vector<at::Tensor> params;
  };

  explicit OwnGroups(std::shared_ptr<torch::optim::Optimizer> optimizer);
  // What the groups have now is known from here on: the engine has changed them itself.
  void note();
  // What came since, by group; a new group is there without parameters, too. UsageError where something was taken out. Local.
  std::vector<Added> added() const;
  // Takes that out of the groups.
  void take_back();

 private:
  std::vector<std::vector<const void*>> present() const;

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<std::vector<const void*>> known_;
};

}  // namespace tessera::nn

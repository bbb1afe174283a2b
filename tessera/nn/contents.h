// Contents: whether a module still has, and uses, the parameters that its engine was built of: Note [Replaced parameters] in
// tessera/engine/contents.h.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/engine/contents.h"

namespace tessera::nn {

class Contents {
 public:
  explicit Contents(std::shared_ptr<torch::nn::Module> module);

  // What is wrong, without an origin; empty where nothing is. Besides modules that were added or replaced, it sees a layer of torch
  // or of Tessera whose member was given another tensor (`linear->weight = tensor`): its forward reads the member, and the
  // registered parameter gets no gradient. Local.
  std::string fault() const;

 private:
  struct Member {
    const at::Tensor* handle;
    const void* param;
    std::string name;
  };

  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::shared_ptr<torch::nn::Module>> kept_;  // whose members these are
  std::vector<Member> members_;
  std::vector<engine::NamedParam> built_;
  std::vector<at::Tensor> params_;
};

}  // namespace tessera::nn

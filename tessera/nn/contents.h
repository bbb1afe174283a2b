// Contents: whether a module still has, and uses, the parameters that its engine was built of: Note [Replaced parameters] in
// tessera/engine/contents.h.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/engine/contents.h"
#include "tessera/engine/engine.h"

namespace tessera::nn {

class Contents {
 public:
  explicit Contents(std::shared_ptr<torch::nn::Module> module);

  // See engine::compare_contents. Besides modules that were added or replaced, the report names a layer of torch
  // or of Tessera whose member was given another tensor (`linear->weight = tensor`): its forward reads the member, and the
  // registered parameter gets no gradient. `params`: the engine's, with those that came later. Local.
  engine::ContentsReport report(const std::vector<engine::ParamSpec>& params) const;

 private:
  struct KnownModule {
    std::shared_ptr<torch::nn::Module> module;
    std::vector<const void*> children, params;  // the module's own
    bool is_layer = false;                      // the module's forward reads members and nothing else
  };
  struct Member {
    const at::Tensor* handle;
    const void* param;
    std::string name;
  };
  void note(const std::shared_ptr<torch::nn::Module>& part, const std::string& path);
  bool same_objects() const;

  std::shared_ptr<torch::nn::Module> module_;
  std::vector<KnownModule> parts_;
  std::vector<Member> members_;
  std::vector<engine::NamedParam> built_;
};

}  // namespace tessera::nn

// Layers of a plain torch::nn::Sequential in an engine that partitions parameters: each is gathered around its own call.
//
// Note [Layers in a Sequential]
//   A Sequential calls its layers through AnyModules, which its iterators let others replace. While an engine lives, those of layers
//   that are none of Tessera's (hooked.h) hold a GatheredLayer, which has the AnyModule that was there. Children, names and
//   parameters are the module's own, and so is what ptr(i), operator[] and AnyModule::ptr() give; at<M>(i) and ptr<M>(i), which
//   ask the AnyModule for its class, do not find M meanwhile. A call of the layer that does not go through the Sequential or its
//   AnyModules gathers nothing: a leaf module (leaf_module in the configuration) around it is gathered as before.
#pragma once

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/nn/scope.h"

namespace tessera::nn {

// One layer, of any arguments and results.
class GatheredLayer final : public torch::nn::Module, public ScopeHolder {
 public:
  explicit GatheredLayer(torch::nn::AnyModule layer);
  torch::nn::AnyModule& layer() { return layer_; }
  torch::nn::AnyValue call(std::vector<torch::nn::AnyValue>&& arguments);
  // What the constructor of AnyModule asks for; a call comes as call().
  at::Tensor forward(at::Tensor input);

 private:
  torch::nn::AnyModule layer_;
};

// The layers of Sequentials in `root` that are gathered by themselves, by their own modules.
std::unordered_map<const torch::nn::Module*, GatheredLayer*> gathered_layers(const torch::nn::Module& root);

// Keeps GatheredLayers in the Sequentials of a model, but for those inside the modules of the paths `leaves`, and in ScopeHolders.
class GatheredSequences {
 public:
  GatheredSequences(std::shared_ptr<torch::nn::Module> root, std::vector<std::string> leaves);
  ~GatheredSequences();  // the layers are back in their places
  GatheredSequences(const GatheredSequences&) = delete;
  GatheredSequences& operator=(const GatheredSequences&) = delete;
  // Takes layers that came later.
  void wrap();

 private:
  void wrap(torch::nn::SequentialImpl& sequence);

  const std::shared_ptr<torch::nn::Module> root_;
  const std::vector<std::string> leaves_;
  std::vector<std::weak_ptr<torch::nn::Module>> sequences_;
};

}  // namespace tessera::nn

namespace torch::nn {

// A layer's own module stands for it.
template <>
struct AnyModuleHolder<tessera::nn::GatheredLayer, at::Tensor> final : AnyModulePlaceholder {
  explicit AnyModuleHolder(std::shared_ptr<tessera::nn::GatheredLayer>&& layer)
      : AnyModulePlaceholder(typeid(tessera::nn::GatheredLayer)), module(std::move(layer)) {}
  AnyValue forward(std::vector<AnyValue>&& arguments) override { return module->call(std::move(arguments)); }
  std::shared_ptr<Module> ptr() override { return module->layer().ptr(); }
  std::unique_ptr<AnyModulePlaceholder> copy() const override { return std::make_unique<AnyModuleHolder>(*this); }
  std::unique_ptr<AnyModulePlaceholder> clone_module(std::optional<Device> device) const override {
    return std::make_unique<AnyModuleHolder>(
        std::make_shared<tessera::nn::GatheredLayer>(module->layer().clone(device)));
  }

  std::shared_ptr<tessera::nn::GatheredLayer> module;
};

}  // namespace torch::nn

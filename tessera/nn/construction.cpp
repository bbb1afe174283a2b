#include "tessera/nn/construction.h"

#include "tessera/config/resolve.h"
#include "tessera/nn/scope.h"

namespace tessera::nn {

Construction::Construction(const Config& config, comm::Mesh mesh)
    : mesh_(std::move(mesh)),
      dtype_(config::zero_options(config).precision.param),
      early_(std::make_shared<zero::EarlyParams>(zero::Ranks(mesh_), config::zero_options(config).weight_home)) {}

void Construction::partition_parameters(const torch::nn::Module& module) {
  zero::EarlyParams& early = live();
  held_error_->rethrow();
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (numbers_.contains(tensor.unsafeGetTensorImpl())) continue;
    if (tensor.is_meta() || !at::isFloatingType(tensor.scalar_type())) continue;
    numbers_[tensor.unsafeGetTensorImpl()] = early.add(item.key(), tensor, dtype_);
  }
}

void Construction::realize(const torch::nn::Module& module, Deferred& deferred, std::optional<c10::Device> device) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : module.named_parameters())
    if (at::isFloatingType(item.value().scalar_type())) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  const auto put = [&](const at::Tensor& param) {
    const void* key = param.unsafeGetTensorImpl();
    if (numbers_.contains(key))
      release({param}, 0);
    else
      numbers_[key] = early_->add(names.at(key), param, dtype_);
  };
  std::vector<at::Tensor> held = module.parameters();
  for (const at::Tensor& buffer : module.buffers())
    held.push_back(buffer);
  deferred.run({.keeps = [&](const at::Tensor& t) { return names.contains(t.unsafeGetTensorImpl()); },
                .put = put,
                .take = [&](const at::Tensor& param) { gather({param}, 0); }},
               held, device);
  partition_parameters(module);
}

std::vector<int> Construction::numbers_of(const std::vector<at::Tensor>& params) const {
  std::vector<int> numbers;
  for (const at::Tensor& param : params) {
    const auto found = numbers_.find(param.unsafeGetTensorImpl());
    if (found != numbers_.end()) numbers.push_back(found->second);
  }
  return numbers;
}

void Construction::gather(const std::vector<at::Tensor>& params, int writer) {
  zero::EarlyParams& early = live();
  held_error_->rethrow();
  early.gather(numbers_of(params), writes_of(writer), writer);
}

void Construction::release(const std::vector<at::Tensor>& params, int writer) {
  live().release(numbers_of(params), writes_of(writer), writer);
}

void Construction::restore(const at::Tensor& param) const {
  zero::EarlyParams& early = live();
  for (const int number : numbers_of({param}))
    early.restore(number);
}

void Construction::hand_over(std::vector<engine::ParamSpec>& specs) const {
  live();
  held_error_->rethrow();
  for (engine::ParamSpec& spec : specs) {
    const auto found = numbers_.find(spec.tensor.unsafeGetTensorImpl());
    if (found == numbers_.end()) continue;
    spec.restore = [early = early_, number = found->second] { early->restore(number); };
  }
}

}  // namespace tessera::nn

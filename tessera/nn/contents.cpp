#include "tessera/nn/contents.h"

#include <torch/nn/modules.h>

#include <algorithm>

#include "tessera/nn/parallel.h"

namespace tessera::nn {

namespace {

using Handles = std::vector<std::pair<const char*, const at::Tensor*>>;

template <class M>
void append(const torch::nn::Module& module, Handles& handles) {
  const auto* layer = dynamic_cast<const M*>(&module);
  if (layer == nullptr) return;
  if constexpr (requires { layer->weight; }) handles.emplace_back("weight", &layer->weight);
  if constexpr (requires { layer->bias; }) handles.emplace_back("bias", &layer->bias);
}

template <class... M>
Handles handles_of(const torch::nn::Module& module) {
  Handles handles;
  (append<M>(module, handles), ...);
  return handles;
}

Handles members_of(const torch::nn::Module& module) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace): a list of its layers
  return handles_of<LinearImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl,
                    ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl, LayerNormImpl, GroupNormImpl,
                    BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl, InstanceNorm2dImpl,
                    InstanceNorm3dImpl, PReLUImpl, ColumnLinearImpl, RowLinearImpl, VocabEmbeddingImpl>(module);
}

int64_t id_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl());
}

std::vector<engine::NamedParam> named(const torch::nn::Module& module) {
  std::vector<engine::NamedParam> params;
  for (const auto& item : module.named_parameters())
    params.push_back({item.key(), id_of(item.value()), item.value().requires_grad()});
  return params;
}

}  // namespace

Contents::Contents(std::shared_ptr<torch::nn::Module> module)
    : module_(std::move(module)), built_(named(*module_)), params_(module_->parameters()) {
  for (const auto& part : module_->named_modules("", /*include_self=*/false)) {
    const size_t before = members_.size();
    for (const auto& [name, handle] : members_of(*part.value())) {
      const auto own = part.value()->named_parameters(/*recurse=*/false);
      const at::Tensor* param = own.find(name);
      if (param != nullptr && param->is_same(*handle))
        members_.push_back({handle, param->unsafeGetTensorImpl(), part.key() + "." + name});
    }
    if (members_.size() > before) kept_.push_back(part.value());
  }
}

std::string Contents::fault() const {
  const std::vector<at::Tensor> now = module_->parameters();
  const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (!std::ranges::equal(now, params_, same)) {
    std::unordered_set<int64_t> known;
    for (const at::Tensor& param : params_)
      known.insert(id_of(param));
    if (std::string fault = engine::compare_contents(built_, named(*module_), known).fault; !fault.empty())
      return fault;
  }
  for (const Member& member : members_)
    if (member.handle->unsafeGetTensorImpl() != member.param)
      return member.name +
             ": the layer's member was given another tensor after the engine was built, which trains and saves the one "
             "that is "
             "registered; copy values into that one (torch::NoGradGuard, copy_())";
  return {};
}

}  // namespace tessera::nn

#include "tessera/nn/contents.h"

#include <torch/nn/modules.h>

#include <algorithm>
#include <typeinfo>

#include "tessera/nn/parallel.h"

namespace tessera::nn {

namespace {

struct Members {
  std::vector<std::pair<const char*, const at::Tensor*>> handles;
  bool all = false;  // of a layer itself, whose forward reads nothing else; a derived class may
};

template <class M>
void append(const torch::nn::Module& module, Members& members) {
  const auto* layer = dynamic_cast<const M*>(&module);
  if (layer == nullptr) return;
  members.all = members.all || typeid(module) == typeid(M);
  const auto add = [&](const char* name, const at::Tensor& member) { members.handles.emplace_back(name, &member); };
  if constexpr (requires { layer->weight; }) add("weight", layer->weight);
  if constexpr (requires { layer->bias; }) add("bias", layer->bias);
  if constexpr (requires { layer->in_proj_weight; }) {
    add("in_proj_weight", layer->in_proj_weight);
    add("in_proj_bias", layer->in_proj_bias);
    add("q_proj_weight", layer->q_proj_weight);
    add("k_proj_weight", layer->k_proj_weight);
    add("v_proj_weight", layer->v_proj_weight);
    add("bias_k", layer->bias_k);
    add("bias_v", layer->bias_v);
  }
  if constexpr (requires { layer->weight_ih; }) {
    add("weight_ih", layer->weight_ih);
    add("weight_hh", layer->weight_hh);
    add("bias_ih", layer->bias_ih);
    add("bias_hh", layer->bias_hh);
  }
}

template <class... M>
Members members_of_any(const torch::nn::Module& module) {
  Members members;
  (append<M>(module, members), ...);
  return members;
}

Members members_of(const torch::nn::Module& module) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace): a list of its layers
  return members_of_any<LinearImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl,
                        ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl, LayerNormImpl, GroupNormImpl,
                        BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl, InstanceNorm2dImpl,
                        InstanceNorm3dImpl, PReLUImpl, MultiheadAttentionImpl, RNNCellImpl, LSTMCellImpl, GRUCellImpl,
                        ColumnLinearImpl, RowLinearImpl, VocabEmbeddingImpl>(module);
}

int64_t id_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl());
}

std::vector<const void*> pointers(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> found;
  for (const at::Tensor& tensor : tensors)
    found.push_back(tensor.unsafeGetTensorImpl());
  return found;
}

std::vector<const void*> pointers(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::vector<const void*> found;
  for (const auto& module : modules)
    found.push_back(module.get());
  return found;
}

std::vector<engine::NamedParam> named(const torch::nn::Module& module) {
  std::vector<engine::NamedParam> params;
  for (const auto& item : module.named_parameters())
    params.push_back({item.key(), id_of(item.value()), item.value().requires_grad()});
  return params;
}

}  // namespace

Contents::Contents(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)), built_(named(*module_)) {
  note(module_, "");
  for (const auto& part : module_->named_modules("", /*include_self=*/false))
    note(part.value(), part.key());
}

void Contents::note(const std::shared_ptr<torch::nn::Module>& part, const std::string& path) {
  const auto own = part->named_parameters(/*recurse=*/false);
  parts_.push_back({part, pointers(part->children()), pointers(own.values())});
  const Members members = members_of(*part);
  size_t registered = 0;
  for (const auto& [name, handle] : members.handles) {
    const at::Tensor* param = own.find(name);
    if (param == nullptr || !param->is_same(*handle)) continue;
    members_.push_back({handle, param->unsafeGetTensorImpl(), (path.empty() ? "" : path + ".") + name});
    ++registered;
  }
  parts_.back().is_layer = members.all && registered > 0 && registered == own.size();
}

// Objects are compared without their names, whose making would cost most.
bool Contents::same_objects() const {
  return std::ranges::all_of(parts_, [](const KnownModule& part) {
    return pointers(part.module->children()) == part.children &&
           (part.is_layer || pointers(part.module->parameters(/*recurse=*/false)) == part.params);
  });
}

engine::ContentsReport Contents::report(const std::vector<engine::ParamSpec>& params) const {
  engine::ContentsReport report;
  if (!same_objects()) {
    std::unordered_set<int64_t> known;
    for (const engine::NamedParam& param : built_)
      known.insert(param.id);
    for (const engine::ParamSpec& param : params)
      known.insert(id_of(param.tensor));
    report = engine::compare_contents(built_, named(*module_), known);
  }
  for (const Member& member : members_) {
    if (!report.fault.empty()) break;
    if (member.handle->unsafeGetTensorImpl() != member.param)
      report.fault = member.name +
                     ": the layer's member was given another tensor after the engine was built, which trains and saves "
                     "the one that is registered; copy values into that one (torch::NoGradGuard, copy_())";
  }
  return report;
}

}  // namespace tessera::nn

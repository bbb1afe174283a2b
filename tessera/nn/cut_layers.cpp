#include "tessera/nn/cut_layers.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/sequence_cut.h"
#include "tessera/nn/summed_params.h"
#include "tessera/parallel/held.h"
#include "tessera/parallel/vocabulary.h"
#include "tessera/shard/storage.h"

namespace tessera::nn {
namespace {

using shard::kOwnKey;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The note on the result of t() of a linear layer's weight, which a product takes next.
struct TurnedWeight : c10::BackendMeta {
  at::Tensor weight;
};

bool is_keyed(const at::Tensor& t) {
  return t.defined() && t.unsafeGetTensorImpl()->key_set().has(kOwnKey);
}

template <class Note>
const Note* note_of(const at::Tensor& t) {
  return is_keyed(t) ? dynamic_cast<const Note*>(t.unsafeGetTensorImpl()->get_backend_meta()) : nullptr;
}

std::string described(const at::Tensor& t) {
  const auto* turned = note_of<TurnedWeight>(t);
  const CutParam* param = cut_param(turned != nullptr ? turned->weight : t);
  if (param == nullptr) return "a view of a parameter that is cut";
  return c10::str("parameter '", param->name, "', of which this rank has a slice (", param->layer()->rule, "),");
}

[[noreturn]] void refuse(const at::Tensor& t, std::string_view op) {
  TESSERA_FAIL(UsageError, "[tensor_parallel] ", described(t), " is used by ", op,
               ", which knows nothing of the other ranks' slices; call the module, torch::nn::functional::linear() or "
               "embedding() "
               "with the weight as it is, or give the module a rule with partition_type skip in "
               "tensor_parallel.partition_config");
}

// What an alias is to its keyed tensor.
struct AliasOf {
  bool turned = false;       // transposed, and a TurnedWeight
  std::string refused = {};  // operator that must not be trained through; "": the gradient is the parameter's
};

// A tensor over the same memory with another TensorImpl, without the key.
at::Tensor alias_of(const at::Tensor& t, const AliasOf& how) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  c10::Storage storage = t.unsafeGetTensorImpl()->unsafe_storage();
  const auto keys = how.turned ? impl.key_set() : impl.key_set().remove(kOwnKey);
  auto alias = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, impl.dtype());
  auto sizes = t.sizes().vec(), strides = t.strides().vec();
  if (how.turned) {
    std::swap(sizes[0], sizes[1]);
    std::swap(strides[0], strides[1]);
    auto note = c10::make_intrusive<TurnedWeight>();
    note->weight = t;
    alias->set_backend_meta(std::move(note));
  }
  alias->set_sizes_and_strides(sizes, strides, t.storage_offset());
  if (!t.is_inference()) alias->set_version_counter(impl.version_counter());
  return at::Tensor(std::move(alias));
}

struct Alias : torch::autograd::Function<Alias> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, const AliasOf& how) {
    if (!how.refused.empty()) parallel::hold(ctx, std::pair(t, how.refused));
    return alias_of(t, how);
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    if (ctx->saved_data.find("held") != ctx->saved_data.end()) {
      const auto& [tensor, op] = parallel::held<std::pair<at::Tensor, std::string>>(ctx);
      refuse(tensor, op);
    }
    return {std::move(gradients[0]), {}};
  }
};

at::Tensor aliased(const at::Tensor& t, const AliasOf& how) {
  return parallel::records(t) ? Alias::apply(t, how) : alias_of(t, how);
}

// The tensor as this key's kernels pass it on.
at::Tensor plain(const at::Tensor& t) {
  return is_keyed(t) ? aliased(t, {}) : t;
}

// The tensor for an operator that is none of a layer: what is recorded cannot be trained through.
at::Tensor looked_at(const at::Tensor& t, const std::string& op) {
  return is_keyed(t) && parallel::records(t) ? aliased(t, {.refused = op}) : t;
}

// ---- layers

at::Tensor joined(const at::Tensor& own, const CutLayer& layer) {
  const auto& [group, label] = std::tie(layer.region.group, layer.region.label);
  if (layer.kind == CutLayer::Kind::SharedTail) return parallel::share_outputs(own, group, layer.own_use, label);
  return parallel::join_outputs(own, group, layer.gather, layer.sizes, layer.tail, label);
}

at::Tensor linear_of(const CutLayer& layer, const at::Tensor& x, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias) {
  const at::Tensor own = plain(weight);
  const auto added = bias && bias->defined() ? std::optional(plain(*bias)) : std::nullopt;
  const bool cuts = layer.sequence != nullptr && layer.sequence->is_on();
  const parallel::Region& region = cuts ? layer.cut_region : layer.region;
  switch (layer.kind) {
    case CutLayer::Kind::Row: {
      const at::Tensor mine = parallel::own_inputs(x, region.group, layer.total, layer.ranges, region.label);
      if (layer.summed != nullptr && mine.is_same(x)) layer.summed->look(region.label, x);
      if (!cuts || !added) return parallel::row_linear(mine, own, added, region);
      // As where LibTorch adds it behind matmul: its gradient is that of a part, which the plan has summed.
      const at::Tensor sum = parallel::row_linear(mine, own, std::nullopt, region);
      return sum + added->to(sum.scalar_type());
    }
    case CutLayer::Kind::SharedTail:
      return joined(at::linear(x, own, added), layer);
    default:
      return joined(parallel::column_linear(x, own, added, region), layer);
  }
}

at::Tensor cut_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const CutParam* param = cut_param(weight);
  if (param == nullptr || !param->linear) refuse(is_keyed(weight) ? weight : is_keyed(x) ? x : *bias, "linear");
  return linear_of(*param->linear, x, weight, bias);
}

at::Tensor cut_t(const at::Tensor& self) {
  const CutParam* param = cut_param(self);
  if (param != nullptr && param->linear && self.dim() == 2) return aliased(self, {.turned = true});
  const at::Tensor seen = looked_at(self, "t");
  const c10::impl::ExcludeDispatchKeyGuard below(kOwnKey);
  return at::t(seen);
}

at::Tensor cut_matmul(const at::Tensor& x, const at::Tensor& other) {
  const auto* turned = note_of<TurnedWeight>(other);
  if (turned == nullptr) refuse(is_keyed(other) ? other : x, "matmul");
  return linear_of(*cut_param(turned->weight)->linear, x, turned->weight, std::nullopt);
}

at::Tensor cut_addmm(const at::Tensor& bias, const at::Tensor& x, const at::Tensor& other, const at::Scalar& beta,
                     const at::Scalar& alpha) {
  const auto* turned = note_of<TurnedWeight>(other);
  if (turned == nullptr || beta.toDouble() != 1 || alpha.toDouble() != 1 || bias.dim() != 1)
    refuse(is_keyed(other) ? other : is_keyed(x) ? x : bias, "addmm");
  return linear_of(*cut_param(turned->weight)->linear, x, turned->weight, bias);
}

at::Tensor cut_embedding(const at::Tensor& weight, const at::Tensor& indices, c10::SymInt padding_idx,
                         bool scale_grad_by_freq, bool sparse) {
  const CutParam* param = cut_param(weight);
  if (param == nullptr || !param->embedding || scale_grad_by_freq || sparse)
    refuse(is_keyed(weight) ? weight : indices, "embedding");
  const CutLayer& layer = *param->embedding;
  const int64_t given = padding_idx.expect_int(), padding = given >= 0 ? given : layer.padding;
  if (layer.kind == CutLayer::Kind::Vocabulary)
    return parallel::vocab_embedding(indices, plain(weight), layer.ranges[0].begin, layer.total, padding, layer.region);
  return joined(at::embedding(plain(weight), indices, padding), layer);
}

// The bias of a layer, joined as the layer's outputs are; other addends are looked at.
at::Tensor addend(const at::Tensor& other, const at::Scalar& alpha, const char* op) {
  const CutParam* param = cut_param(other);
  if (param == nullptr || !param->bias || alpha.toDouble() != 1) return looked_at(other, op);
  return joined(plain(other), *param->bias);
}

at::Tensor cut_add(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  const at::Tensor one = looked_at(self, "add"), two = addend(other, alpha, "add");
  const c10::impl::ExcludeDispatchKeyGuard below(kOwnKey);
  return at::add(one, two, alpha);
}

at::Tensor& cut_add_(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  const at::Tensor added = addend(other, alpha, "add_");
  const c10::impl::ExcludeDispatchKeyGuard below(kOwnKey);
  return self.add_(added, alpha);
}

// ---- all other operators

constexpr std::array<std::string_view, 13> kProducts{
    "aten::mm",    "aten::bmm",       "aten::baddbmm",      "aten::addbmm",        "aten::mv",
    "aten::addmv", "aten::dot",       "aten::index_select", "aten::embedding_bag", "aten::_embedding_bag",
    "aten::vdot",  "aten::tensordot", "aten::bilinear"};

constexpr std::array<std::string_view, 3> kCopies{"aten::clone", "aten::to", "aten::_to_copy"};

void look(c10::IValue& value, const std::string& op) {
  if (value.isTensor()) {
    value = looked_at(value.toTensor(), op);
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list = value.toTensorList();
    for (size_t i = 0; i < list.size(); ++i)
      list.set(i, looked_at(list.get(i), op));
  }
}

void refuse_product(const c10::IValue& value, std::string_view op) {
  if (value.isTensor() && is_keyed(value.toTensor())) refuse(value.toTensor(), op);
}

// The note of a parameter that is copied, by Module::clone() and Module::to() or in another dtype: the copy is a slice, too.
CutParamPtr note_to_copy(const std::string& op, const c10::IValue& value) {
  if (std::ranges::find(kCopies, op) == kCopies.end() || !value.isTensor() || value.toTensor().is_view())
    return nullptr;
  return cut_note(value.toTensor());
}

void other_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::string& name = op.operator_name().name;
  const auto& arguments = op.schema().arguments();
  const bool product = std::ranges::find(kProducts, name) != kProducts.end();
  const bool detaches = name == "aten::detach";  // its result has no graph
  c10::IValue& first = (*stack)[stack->size() - arguments.size()];
  const CutParamPtr copied = note_to_copy(name, first);
  if (copied != nullptr) first = plain(first.toTensor());
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    if (product) refuse_product(value, name);
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (!detaches && (alias == nullptr || !alias->isWrite())) look(value, name);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kOwnKey), stack);
  if (copied == nullptr) return;
  at::Tensor copy = stack->back().toTensor();
  if (!is_keyed(copy)) set_cut(copy, copy.detach(), copied);
}

}  // namespace

const CutParam* cut_param(const at::Tensor& tensor) {
  return note_of<CutParam>(tensor);
}

void set_cut(at::Tensor& param, const at::Tensor& value, CutParamPtr note) {
  shard::set_keyed_data(param, value, std::move(note));
}

CutParamPtr cut_note(const at::Tensor& tensor) {
  const CutParam* param = cut_param(tensor);
  return param == nullptr ? CutParamPtr() : CutParamPtr::reclaim_copy(const_cast<CutParam*>(param));
}

void keep_cut(at::Tensor& param, const CutParamPtr& note) {
  if (!is_keyed(param)) shard::set_keyed_data(param, param.detach(), note);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&other_operator>());
}
TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  library.impl("linear", cut_linear);
  library.impl("t", cut_t);
  library.impl("matmul", cut_matmul);
  library.impl("addmm", cut_addmm);
  library.impl("embedding", cut_embedding);
  library.impl("add.Tensor", cut_add);
  library.impl("add_.Tensor", cut_add_);
}

}  // namespace tessera::nn

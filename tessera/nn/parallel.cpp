#include "tessera/nn/parallel.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/nn/cut_layers.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/vocabulary.h"

namespace tessera::nn {
namespace {

using parallel::Ranges;
using parallel::Region;
using parallel::Sizes;

Ranges own_ranges(const Region& region, int64_t total, const Sizes& subs, parallel::SizeRule rule) {
  TESSERA_CHECK_VALUE(region.group != nullptr, "nn", region.label, ": there is no group of ranks");
  int64_t sum = 0;
  for (const int64_t sub : subs)
    sum += sub;
  TESSERA_CHECK_VALUE(subs.empty() || sum == total, "nn", region.label, ": sub-parameters add up to ", sum,
                      ", the layer has ", total);
  return parallel::packed_ranges(subs.empty() ? Sizes{total} : subs, region.group->size(),
                                 {rule})[region.group->rank()];
}

// A slice as a leaf; notes its cut. Where nothing is cut the whole.
at::Tensor own_slice(const Region& region, const at::Tensor& whole, int64_t dim, const Ranges& ranges,
                     const std::string& name, std::map<std::string, shard::CutPtr>& cuts) {
  if (region.group->size() == 1) return whole.detach();
  cuts[name] = shard::cut_along(whole.sizes().vec(), dim, ranges);
  return parallel::take_slice(whole.detach(), *cuts[name]);
}

}  // namespace

ColumnLinearImpl::ColumnLinearImpl(const torch::nn::LinearOptions& options, Region region, const Sizes& subs,
                                   parallel::SizeRule rule)
    : options(options), region_(std::move(region)), ranges_(own_ranges(region_, options.out_features(), subs, rule)) {
  ColumnLinearImpl::reset();
}

// Takes its slice of the values of a whole layer: with one seed a model is the same on any number of ranks.
void ColumnLinearImpl::reset() {
  const torch::nn::LinearImpl whole(options);
  weight = register_parameter("weight", own_slice(region_, whole.weight, 0, ranges_, "weight", cuts_));
  if (options.bias()) bias = register_parameter("bias", own_slice(region_, whole.bias, 0, ranges_, "bias", cuts_));
}

at::Tensor ColumnLinearImpl::forward(const at::Tensor& x) {
  return parallel::column_linear(x, weight, bias, region_);
}

RowLinearImpl::RowLinearImpl(const torch::nn::LinearOptions& options, Region region, const Sizes& subs,
                             parallel::SizeRule rule)
    : options(options), region_(std::move(region)), ranges_(own_ranges(region_, options.in_features(), subs, rule)) {
  RowLinearImpl::reset();
}

void RowLinearImpl::reset() {
  const torch::nn::LinearImpl whole(options);
  weight = register_parameter("weight", own_slice(region_, whole.weight, 1, ranges_, "weight", cuts_));
  if (options.bias()) bias = register_parameter("bias", whole.bias.detach());
}

at::Tensor RowLinearImpl::forward(const at::Tensor& x) {
  return parallel::row_linear(x, weight, bias, region_);
}

VocabEmbeddingImpl::VocabEmbeddingImpl(const torch::nn::EmbeddingOptions& options, Region region,
                                       parallel::SizeRule rule)
    : options(options), region_(std::move(region)), ranges_(own_ranges(region_, options.num_embeddings(), {}, rule)) {
  TESSERA_CHECK_BUILT(!options.max_norm() && !options.scale_grad_by_freq() && !options.sparse(), "nn", region_.label,
                      ": max_norm, scale_grad_by_freq and sparse of an embedding whose vocabulary is cut");
  VocabEmbeddingImpl::reset();
}

void VocabEmbeddingImpl::reset() {
  const torch::nn::EmbeddingImpl whole(options);
  weight = register_parameter("weight", own_slice(region_, whole.weight, 0, ranges_, "weight", cuts_));
}

at::Tensor VocabEmbeddingImpl::forward(const at::Tensor& indices) {
  return parallel::vocab_embedding(indices, weight, ranges_[0].begin, options.num_embeddings(),
                                   options.padding_idx().value_or(-1), region_);
}

namespace {

// Calls f(parameter, cut) for every slice in `module`.
template <class F>
void for_cuts(const torch::nn::Module& module, F&& f) {
  module.apply([&](const torch::nn::Module& m) {
    const auto params = m.named_parameters(/*recurse=*/false);
    for (const auto& item : params)
      if (const CutParam* param = cut_param(item.value()); param != nullptr && param->cut) f(item.value(), param->cut);
    const auto* holder = dynamic_cast<const CutHolder*>(&m);
    for (const auto& [name, cut] : holder == nullptr ? std::map<std::string, shard::CutPtr>() : holder->cuts())
      f(params[name], cut);
  });
}

at::Tensor param_of(const torch::nn::Module& module, const std::string& name) {
  const auto params = module.named_parameters();
  const at::Tensor* found = params.find(name);
  TESSERA_CHECK_VALUE(found != nullptr, "nn", "the module has no parameter '", name, "'");
  return *found;
}

}  // namespace

shard::CutPtr cut_of(const torch::nn::Module& module, const std::string& name) {
  const at::Tensor param = param_of(module, name);
  shard::CutPtr found;
  for_cuts(module, [&](const at::Tensor& slice, const shard::CutPtr& cut) {
    if (slice.is_same(param)) found = cut;
  });
  return found;
}

Sizes whole_sizes(const torch::nn::Module& module, const std::string& name) {
  const shard::CutPtr cut = cut_of(module, name);
  return cut ? cut->sizes : param_of(module, name).sizes().vec();
}

void set_whole(torch::nn::Module& module, const std::string& name, const at::Tensor& whole) {
  const shard::CutPtr cut = cut_of(module, name);
  at::Tensor param = param_of(module, name);
  const Sizes sizes = cut ? cut->sizes : param.sizes().vec();
  TESSERA_CHECK_VALUE(whole.sizes() == at::IntArrayRef(sizes), "nn", "a value of ", whole.sizes(), " for parameter '",
                      name, "', which is ", cut ? "a slice of " : "of ", at::IntArrayRef(sizes));
  const at::NoGradGuard guard;
  param.copy_(cut ? parallel::take_slice(whole, *cut) : whole);
}

void mark_cuts(const torch::nn::Module& module, std::vector<engine::ParamSpec>& specs) {
  std::unordered_map<const void*, shard::CutPtr> cuts;
  for_cuts(module, [&](const at::Tensor& slice, const shard::CutPtr& cut) { cuts[slice.unsafeGetTensorImpl()] = cut; });
  for (engine::ParamSpec& spec : specs) {
    const auto found = cuts.find(spec.tensor.unsafeGetTensorImpl());
    if (found == cuts.end()) continue;
    spec.cut = found->second;
    spec.varies = comm::Axis::Tp;
  }
}

}  // namespace tessera::nn

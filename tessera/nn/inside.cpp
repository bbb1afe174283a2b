#include "tessera/nn/inside.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/cut_layers.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/held.h"

namespace tessera::nn {
namespace {

// Ends of nodes' names: a region begins at kBegin; nodes of kBehind are behind an earlier region.
constexpr std::array<std::string_view, 3> kBegin{"ColumnFunction>", "MoveFunction>", "BorderFunction>"};
constexpr std::array<std::string_view, 2> kBehind{"RowFunction>", "EmbeddingFunction>"};

bool ends_with_any(const std::string& name, std::span<const std::string_view> endings) {
  return std::ranges::any_of(endings, [&](std::string_view ending) { return name.ends_with(ending); });
}

}  // namespace

Inside::Inside(const torch::nn::Module& module, std::vector<std::string> lists, comm::GroupPtr group)
    : lists_(std::move(lists)), group_(std::move(group)) {
  for (const auto& item : module.named_parameters())
    params_.push_back({item.key(), WeakTensor(item.value().getIntrusivePtr())});
}

void Inside::sum_gradient(const at::Tensor& param) {
  if (!param.requires_grad() || !summed_.insert(param.unsafeGetTensorImpl()).second) return;
  std::string label = "gradient of a whole parameter";
  for (const Known& known : params_)
    if (known.param._unsafe_get_target() == param.unsafeGetTensorImpl()) label = "gradient of '" + known.name + "'";
  param.register_hook([group = group_, label](const at::Tensor& gradient) {
    return parallel::reduce_from_ranks(gradient, group, label);
  });
}

Inside::Found Inside::reached(const at::Tensor& x) const {
  std::unordered_map<const void*, const Known*> leaves;  // by the node that accumulates
  std::vector<at::Tensor> held;
  for (const Known& known : params_) {
    const auto impl = known.param.lock();
    if (impl.defined() && impl->requires_grad()) {
      held.emplace_back(impl);
      leaves[torch::autograd::impl::gradient_edge(held.back()).function.get()] = &known;
    }
  }
  Found found;
  std::unordered_set<const void*> seen;
  std::vector<const torch::autograd::Node*> nodes{x.grad_fn().get()};
  while (!nodes.empty()) {
    const torch::autograd::Node* node = nodes.back();
    nodes.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (const auto leaf = leaves.find(node); leaf != leaves.end()) {
      found.params.emplace_back(leaf->second->name, at::Tensor(leaf->second->param.lock()));
      continue;
    }
    const std::string name = node->name();
    if (ends_with_any(name, kBehind) || name.ends_with("AccumulateGrad")) {
      found.beside = true;
      return found;
    }
    if (ends_with_any(name, kBegin)) continue;
    for (const torch::autograd::Edge& edge : node->next_edges())
      nodes.push_back(edge.function.get());
  }
  return found;
}

// The element of the outermost list of modules around a layer, or else its parent: "layers.0.".
std::string Inside::block_of(const std::string& path) const {
  for (size_t dot = path.find('.'); dot != path.npos; dot = path.find('.', dot + 1)) {
    const size_t end = path.find('.', dot + 1);
    if (end != path.npos && std::ranges::find(lists_, path.substr(0, dot)) != lists_.end())
      return path.substr(0, end + 1);
  }
  return path.substr(0, path.rfind('.') + 1);
}

void Inside::look(const std::string& path, const at::Tensor& x) {
  if (seen_.contains(path) || !parallel::records(x)) return;
  seen_.insert(path);
  const Found found = reached(x);
  const std::string block = block_of(path);
  std::string through;
  bool beside = found.beside;
  for (const auto& [name, param] : found.params) {
    through += (through.empty() ? " (through " : ", ") + name;
    const bool settled = summed_.contains(param.unsafeGetTensorImpl()) || cut_param(param) != nullptr;
    beside = beside || (!name.starts_with(block) && !settled);
  }
  TESSERA_CHECK_VALUE(
      !beside, "tensor_parallel", path,
      ": what comes into this row layer depends on activations that every rank has whole beside those of "
      "column layers",
      through, through.empty() ? "" : ")",
      ", and their gradient would be a part of the true one; give the layers around it rules with "
      "partition_type skip in tensor_parallel.partition_config, or, where it is a parameter that only cut "
      "layers use, give that one partition_type skip and \"grad_allreduce\": true");
  for (const auto& [name, param] : found.params)
    if (cut_param(param) == nullptr) sum_gradient(param);
}

}  // namespace tessera::nn

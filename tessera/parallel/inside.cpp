#include "tessera/parallel/inside.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/parallel/held.h"

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Ends of nodes' names: a region begins at kBegin; nodes of kBehind are behind an earlier region.
constexpr std::array<std::string_view, 3> kBegin{"ColumnFunction>", "MoveFunction>", "BorderFunction>"};
constexpr std::array<std::string_view, 2> kBehind{"RowFunction>", "EmbeddingFunction>"};

bool ends_with_any(const std::string& name, std::span<const std::string_view> endings) {
  return std::ranges::any_of(endings, [&](std::string_view ending) { return name.ends_with(ending); });
}

struct BorderFunction : torch::autograd::Function<BorderFunction> {
  static at::Tensor forward(AutogradContext* /*ctx*/, const at::Tensor& t) { return t.detach(); }
  static variable_list backward(AutogradContext* /*ctx*/, variable_list& gradients) {
    return {std::move(gradients[0])};
  }
};

struct Reached {
  std::vector<size_t> params;
  bool beside = false;  // something whole comes in that is none of the parameters
};

Reached reached(const at::Tensor& x, std::span<const RegionParam> params) {
  std::unordered_map<const Node*, size_t> leaves;  // by the node that accumulates
  for (size_t i = 0; i < params.size(); ++i)
    if (params[i].param.requires_grad())
      leaves[torch::autograd::impl::gradient_edge(params[i].param).function.get()] = i;
  Reached found;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> nodes{x.grad_fn().get()};
  while (!nodes.empty()) {
    const Node* node = nodes.back();
    nodes.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (const auto leaf = leaves.find(node); leaf != leaves.end()) {
      found.params.push_back(leaf->second);
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
std::string block_of(const std::string& path, std::span<const std::string> lists) {
  for (size_t dot = path.find('.'); dot != path.npos; dot = path.find('.', dot + 1)) {
    const size_t end = path.find('.', dot + 1);
    if (end != path.npos && std::ranges::find(lists, path.substr(0, dot)) != lists.end())
      return path.substr(0, end + 1);
  }
  return path.substr(0, path.rfind('.') + 1);
}

}  // namespace

at::Tensor border(const at::Tensor& t) {
  return records(t) ? BorderFunction::apply(t) : t;
}

void refuse_weight_alone(const std::string& path) {
  TESSERA_FAIL(UsageError, "[tensor_parallel] ", path,
               ": its weight is used without a call of the module, so what it computes of a slice is not put together "
               "over the ranks; call the module, or give it a rule with partition_type skip in "
               "tensor_parallel.partition_config");
}

std::vector<size_t> whole_inside(const std::string& path, const at::Tensor& x, std::span<const RegionParam> params,
                                 std::span<const std::string> lists) {
  const Reached found = reached(x, params);
  for (const size_t i : found.params)
    if (!params[i].layer.empty()) refuse_weight_alone(params[i].layer);
  const std::string block = block_of(path, lists);
  bool beside = found.beside;
  std::string through;
  std::vector<size_t> whole;
  for (size_t n = 0; n < found.params.size(); ++n) {
    const RegionParam& one = params[found.params[n]];
    if (n < 3) through += (n == 0 ? " (through " : ", ") + one.name;
    if (one.settled) continue;
    beside = beside || !one.name.starts_with(block);
    whole.push_back(found.params[n]);
  }
  TESSERA_CHECK_VALUE(
      !beside, "tensor_parallel", path,
      ": what comes into this row layer depends on activations that every rank has whole beside those of column layers",
      through, through.empty() ? "" : ")",
      ", and their gradient would be a part of the true one; give the layers around it rules with partition_type skip "
      "in tensor_parallel.partition_config, or, where it is a parameter that only cut layers use, give that one "
      "partition_type skip and \"grad_allreduce\": true");
  return whole;
}

}  // namespace tessera::parallel

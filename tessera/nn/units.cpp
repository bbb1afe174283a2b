#include "tessera/nn/units.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <array>
#include <regex>
#include <string>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/nn/parallel.h"
#include "tessera/zero/plan.h"

namespace tessera::nn {
namespace {

// The names of a class: "my::BlockImpl" itself, "BlockImpl", and both without "Impl".
std::vector<std::string> names_of(const torch::nn::Module& module) {
  const std::string full = module.name();
  const size_t colon = full.rfind(':');
  std::vector<std::string> names{full};
  if (colon != std::string::npos) names.push_back(full.substr(colon + 1));
  for (size_t i = names.size(); i-- > 0;)
    if (names[i].ends_with("Impl")) names.push_back(names[i].substr(0, names[i].size() - 4));
  return names;
}

engine::Outline::Module described(const std::string& path, const torch::nn::Module& module) {
  const bool list = module.as<torch::nn::ModuleListImpl>() != nullptr;
  const bool dict = module.as<torch::nn::ModuleDictImpl>() != nullptr;
  const bool sequence = module.as<torch::nn::SequentialImpl>() != nullptr;
  return {path, names_of(module), list || sequence, !list && !dict};
}

}  // namespace

engine::Outline outline(const torch::nn::Module& module) {
  engine::Outline result;
  std::unordered_set<const void*> seen{&module};
  result.modules.push_back(described("", module));
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (seen.insert(item.value().get()).second) result.modules.push_back(described(item.key(), *item.value()));
  for (const auto& item : module.named_parameters())
    result.params.push_back(
        {item.key(), item.value().numel(), reinterpret_cast<int64_t>(item.value().unsafeGetTensorImpl())});
  return result;
}

engine::UnitNames default_unit_policy(const torch::nn::Module& module) {
  return engine::default_units(outline(module));
}

std::vector<engine::ParamSpec> param_specs(const torch::nn::Module& module, const engine::UnitNames& units) {
  std::vector<engine::ParamSpec> specs;
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const auto unit = units.find(item.key());
    specs.push_back(
        {item.key(), tensor, tensor.requires_grad() ? 0 : -1, unit == units.end() ? zero::kRootUnit : unit->second});
    specs.back().joins = 0;
  }
  mark_cuts(module, specs);
  return specs;
}

std::vector<std::string> default_autocast_modules() {
  return {"torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"};
}

namespace {

// Module::name() of a class of torch with this Python name; empty for other names.
std::string name_in_torch(const std::string& python_name) {
  constexpr std::array known{"Linear",
                             "Bilinear",
                             "Conv1d",
                             "Conv2d",
                             "Conv3d",
                             "ConvTranspose1d",
                             "ConvTranspose2d",
                             "ConvTranspose3d",
                             "Embedding",
                             "EmbeddingBag",
                             "LayerNorm",
                             "GroupNorm",
                             "BatchNorm1d",
                             "BatchNorm2d",
                             "BatchNorm3d",
                             "PReLU",
                             "MultiheadAttention",
                             "RNN",
                             "LSTM",
                             "GRU"};
  if (!python_name.starts_with("torch.nn.")) return {};
  const std::string last = python_name.substr(python_name.rfind('.') + 1);
  const bool found = std::any_of(known.begin(), known.end(), [&](const char* name) { return last == name; });
  return found ? "torch::nn::" + last + "Impl" : "";
}

}  // namespace

void mark_autocast(const torch::nn::Module& module, const std::vector<std::string>& names, at::ScalarType dtype,
                   std::vector<engine::ParamSpec>& specs) {
  std::unordered_set<std::string> present, wanted;
  module.apply([&](const torch::nn::Module& m) { present.insert(m.name()); });
  for (const std::string& name : names) {
    const std::string in_torch = name_in_torch(name);
    TESSERA_CHECK_VALUE(!in_torch.empty() || present.contains(name), "initialize",
                        "Failed to import lower precision safe module '", name,
                        "': it is no module of torch.nn with parameters, and no class of this model; in C++ a class of "
                        "your own is named as Module::name() says");
    wanted.insert(in_torch.empty() ? name : in_torch);
  }
  std::unordered_set<const void*> marked;
  module.apply([&](const torch::nn::Module& m) {
    if (!wanted.contains(m.name())) return;
    for (const at::Tensor& p : m.parameters(/*recurse=*/false))
      marked.insert(p.unsafeGetTensorImpl());
  });
  for (engine::ParamSpec& spec : specs) {
    if (marked.contains(spec.tensor.unsafeGetTensorImpl())) spec.comm = dtype;
  }
}

void cast_buffers(const torch::nn::Module& module, std::optional<at::ScalarType> dtype,
                  const std::vector<std::string>& in_fp32) {
  std::vector<std::regex> kept;
  for (const std::string& pattern : in_fp32) {
    try {
      kept.emplace_back(std::regex_replace(pattern, std::regex("\\*"), ".*"));
    } catch (const std::regex_error& error) {
      TESSERA_CHECK_VALUE(false, "config", "data_types.keep_in_fp32_modules: '", pattern,
                          "' is no pattern: ", error.what());
    }
  }
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    const bool keep = std::any_of(kept.begin(), kept.end(),
                                  [&](const std::regex& pattern) { return std::regex_search(item.key(), pattern); });
    const auto to = keep ? std::optional(at::kFloat) : dtype;
    if (buffer.is_floating_point() && to) buffer.set_data(buffer.to(*to));
  }
}

}  // namespace tessera::nn

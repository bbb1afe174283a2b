#include "tessera/nn/units.h"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <array>
#include <string>
#include <unordered_set>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

bool is_container(const torch::nn::Module& module) {
  return module.as<torch::nn::SequentialImpl>() != nullptr || module.as<torch::nn::ModuleListImpl>() != nullptr;
}

class Collector {
 public:
  std::vector<engine::ParamSpec> specs;

  // `unit` is empty while no container has been met on the way down.
  void visit(const torch::nn::Module& module, const std::string& path, const std::string& unit) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = item.value();
      if (!seen_.insert(tensor.unsafeGetTensorImpl()).second) {
        continue;
      }
      const int group = tensor.requires_grad() ? 0 : -1;
      specs.push_back({join(path, item.key()), tensor, group, unit.empty() ? "root" : unit});
    }
    const bool container = is_container(module);
    for (const auto& item : module.named_children()) {
      const std::string child = join(path, item.key());
      visit(*item.value(), child, unit.empty() && container ? child : unit);
    }
  }

 private:
  static std::string join(const std::string& path, const std::string& name) {
    return path.empty() ? name : path + "." + name;
  }

  std::unordered_set<const void*> seen_;
};

}  // namespace

std::vector<engine::ParamSpec> param_specs(const torch::nn::Module& module) {
  Collector collector;
  collector.visit(module, "", "");
  return std::move(collector.specs);
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

void cast_buffers(const torch::nn::Module& module, at::ScalarType dtype) {
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.is_floating_point()) buffer.set_data(buffer.to(dtype));
  }
}

}  // namespace tessera::nn

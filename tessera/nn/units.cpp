#include "tessera/nn/units.h"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <string>
#include <unordered_set>

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

}  // namespace tessera::nn

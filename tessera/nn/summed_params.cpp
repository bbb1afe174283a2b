#include "tessera/nn/summed_params.h"

#include <utility>

#include "tessera/nn/cut_layers.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/held.h"
#include "tessera/parallel/inside.h"

namespace tessera::nn {

SummedParams::SummedParams(const torch::nn::Module& module, std::vector<std::string> lists, comm::GroupPtr group)
    : lists_(std::move(lists)), group_(std::move(group)) {
  for (const auto& item : module.named_parameters())
    params_.push_back({item.key(), WeakTensor(item.value().getIntrusivePtr())});
}

void SummedParams::sum_gradient(const at::Tensor& param) {
  if (!param.requires_grad() || !summed_.insert(param.unsafeGetTensorImpl()).second) return;
  std::string label = "gradient of a whole parameter";
  for (const Known& known : params_)
    if (known.param._unsafe_get_target() == param.unsafeGetTensorImpl()) label = "gradient of '" + known.name + "'";
  param.register_hook([group = group_, label](const at::Tensor& gradient) {
    return parallel::reduce_from_ranks(gradient, group, label);
  });
}

void SummedParams::look(const std::string& path, const at::Tensor& x) {
  if (seen_.contains(path) || !parallel::records(x)) return;
  seen_.insert(path);
  std::vector<parallel::RegionParam> params;
  for (const Known& known : params_) {
    const at::Tensor param(known.param.lock());
    if (!param.defined()) continue;
    const bool settled = summed_.contains(param.unsafeGetTensorImpl()) || cut_param(param) != nullptr;
    params.push_back({known.name, param, settled});
  }
  for (const size_t i : parallel::whole_inside(path, x, params, lists_))
    sum_gradient(params[i].param);
}

}  // namespace tessera::nn

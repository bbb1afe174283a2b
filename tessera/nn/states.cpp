#include "tessera/nn/states.h"

#include "tessera/base/error.h"
#include "tessera/config/text.h"
#include "tessera/engine/client_states.h"
#include "tessera/engine/logical.h"

namespace tessera::nn {

using engine::ClientStates;
using engine::OptimizerStates;
using engine::Quantity;

int ReadStates::number(const ParamKey& key) const {
  at::Tensor param = key.tensor;
  if (!key.name.empty()) {
    const auto params = module_.named_parameters();
    const at::Tensor* found = params.find(key.name);
    const std::string near = found != nullptr ? "" : config::nearest(key.name, params.keys());
    TESSERA_CHECK_VALUE(found != nullptr, "state", "the module has no parameter '", key.name, "'",
                        near.empty() ? "" : ": did you mean '" + near + "'?");
    param = *found;
  }
  return engine::number_of(core_, param);
}

int ReadStates::joined(const ParamKey& key) const {
  const int id = number(key);
  if (trained(id) || core_.params()[id].joins < 0) return id;
  core_.join();
  if (client_ != nullptr) client_->take_joined(core_);
  return id;
}

at::Tensor ReadStates::full_param(const ParamKey& param) const {
  const int id = joined(param);
  return trained(id) ? core_.states().get_full(id, Quantity::Master) : at::Tensor();
}

at::Tensor ReadStates::full_grad(const ParamKey& param) const {
  const int id = joined(param);
  return trained(id) ? core_.states().get_full(id, Quantity::Gradient) : at::Tensor();
}

at::Tensor ReadStates::full_state(const ParamKey& param, const std::string& key) const {
  const int id = joined(param);
  if (!trained(id)) return {};
  return client_ != nullptr ? ClientStates(core_, *client_).get_full(id, key)
                            : OptimizerStates(core_).get_full(id, key);
}

void States::set_full_param(const ParamKey& param, const at::Tensor& value) const {
  core_.states().set_full(joined(param), Quantity::Master, value);
  core_.refresh_params();
}

void States::set_full_grad(const ParamKey& param, const at::Tensor& value) const {
  core_.states().set_full(joined(param), Quantity::Gradient, value);
}

void States::set_full_state(const ParamKey& param, const std::string& key, const at::Tensor& value) const {
  const int id = joined(param);
  client_ != nullptr ? ClientStates(core_, *client_).set_full(id, key, value)
                     : OptimizerStates(core_).set_full(id, key, value);
}

std::pair<int64_t, int64_t> ReadStates::local_range(const ParamKey& param) const {
  return core_.layout().local_range(number(param));
}

at::Tensor ReadStates::local(const ParamKey& param, Quantity what) const {
  const int id = number(param);
  const at::Tensor view = trained(id) ? core_.states().local_view(id, what) : at::Tensor();
  return view.defined() ? view.to(at::kFloat) : view;
}

at::Tensor ReadStates::local_param(const ParamKey& param) const {
  return local(param, Quantity::Master);
}

at::Tensor ReadStates::local_grad(const ParamKey& param) const {
  return local(param, Quantity::Gradient);
}

at::Tensor ReadStates::local_state(const ParamKey& param, const std::string& key) const {
  const int id = number(param);
  if (!trained(id)) return {};
  return client_ != nullptr ? ClientStates(core_, *client_).get_local(id, key)
                            : OptimizerStates(core_).get_local(id, key);
}

void States::set_local_param(const ParamKey& param, const at::Tensor& value) const {
  core_.states().set_local(joined(param), Quantity::Master, value);
  core_.refresh_params();
}

void States::set_local_grad(const ParamKey& param, const at::Tensor& value) const {
  core_.states().set_local(number(param), Quantity::Gradient, value);
}

void States::set_local_state(const ParamKey& param, const std::string& key, const at::Tensor& value) const {
  const int id = number(param);
  client_ != nullptr ? ClientStates(core_, *client_).set_local(id, key, value)
                     : OptimizerStates(core_).set_local(id, key, value);
}

}  // namespace tessera::nn

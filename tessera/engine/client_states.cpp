#include "tessera/engine/client_states.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/engine/logical.h"
#include "tessera/optim/types.h"

namespace tessera::engine {
namespace {

double number_in(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().item<double>();
  if (value.isBool()) return value.toBool() ? 1 : 0;
  return value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool() || (value.isTensor() && value.toTensor().dim() == 0);
}

// Of torch's optimizers, one for a parameter: NAdam's and ASGD's beside the count of updates.
bool is_known_number(const std::string& key) {
  return key == "step" || key == "mu_product" || key == "eta" || key == "mu";
}

}  // namespace

bool is_part(const std::string& key, const at::Tensor& state, const at::Tensor& target) {
  return state.sizes() == target.sizes() && (state.dim() > 0 || !is_known_number(key));
}

c10::IValue part_of_number(const std::string& key, const c10::IValue& state, at::IntArrayRef whole,
                           const at::Tensor& target) {
  const bool is_one = whole.empty() && target.numel() == 1 && state.isTensor() && state.toTensor().dim() == 0;
  if (!is_one || is_known_number(key)) return state;
  return state.toTensor().to(target.device()).view(target.sizes());
}

ClientStates::Kind ClientStates::kind_of(int param, const State& state, const std::string& key) const {
  if (state.empty()) return Kind::Nothing;
  const auto found = state.find(key);
  if (found == state.end()) return Kind::Unknown;
  const c10::IValue& value = found->second;
  if (value.isTensor() && is_part(key, value.toTensor(), kept_.target(param))) return Kind::Part;
  return is_number(value) ? Kind::Number : Kind::Other;
}

void ClientStates::refuse(Kind kind, const std::string& key, const State& state) const {
  std::string there;
  for (const auto& item : state)
    there += (there.empty() ? "; there are " : ", ") + item.first;
  TESSERA_CHECK_VALUE(kind != Kind::Unknown, "state", kept_.name(), " has no state '", key, "' of this parameter",
                      there);
  TESSERA_CHECK_VALUE(kind != Kind::Other, "state", kept_.name(), "'s state '", key,
                      "' is not one value for each element: read the optimizer's own");
}

ClientStates::Kind ClientStates::agreed(int param, const State& state, const std::string& key) const {
  const auto mine = static_cast<double>(kind_of(param, state, key));
  const auto kind = static_cast<Kind>(static_cast<int>(core_.states().agree_max(mine)));
  refuse(kind, key, state);
  if (kind == Kind::Part) {
    const auto [begin, end] = core_.layout().local_range(param);
    const bool lacks = core_.states().agree_max(!state.contains(key) && begin < end ? 1 : 0) > 0;
    TESSERA_CHECK_VALUE(!lacks, "state", "some ranks have no state '", key, "' of their part of this parameter");
  }
  return kind;
}

at::Tensor ClientStates::get_full(int param, const std::string& key) const {
  const State state = kept_.state(param);
  const Kind kind = agreed(param, state, key);
  if (kind == Kind::Nothing) return {};
  const auto found = state.find(key);
  if (kind == Kind::Number) {
    const double mine = found == state.end() ? -std::numeric_limits<double>::infinity() : number_in(found->second);
    return at::scalar_tensor(core_.states().agree_max(mine), at::kFloat);
  }
  const auto options = core_.params()[param].tensor.options().dtype(at::kFloat).requires_grad(false);
  return core_.states().gather_full(param,
                                    found == state.end() ? at::empty({0}, options) : found->second.toTensor().detach());
}

void ClientStates::check(const std::string& key, const at::Tensor& value) const {
  const std::string wrong = wrong_state(optim::family_of(kept_.name()), key, value);
  TESSERA_CHECK_VALUE(wrong.empty(), "state", kept_.name(), "'s state '", key, "' ", wrong);
}

void ClientStates::set_full(int param, const std::string& key, const at::Tensor& full) const {
  core_.layout().check_trained(param, "set_full");
  check(key, full);
  const State state = kept_.state(param);
  const Kind kind = agreed(param, state, key);
  TESSERA_CHECK_VALUE(kind != Kind::Nothing, "state", kept_.name(), " has no state '", key,
                      "' of this parameter yet: it makes it in a step");
  const at::Tensor part = kind == Kind::Number ? full : core_.states().local_part(param, full);
  if (!state.empty()) kept_.write_state(param, key, part);
}

at::Tensor ClientStates::get_local(int param, const std::string& key) const {
  const State state = kept_.state(param);
  const Kind kind = kind_of(param, state, key);
  refuse(kind, key, state);
  if (kind == Kind::Nothing) {
    const auto [begin, end] = core_.layout().local_range(param);
    return begin == end && kept_.has_states() ? at::empty({0}) : at::Tensor();
  }
  const c10::IValue& value = state.at(key);
  return kind == Kind::Number ? at::scalar_tensor(number_in(value), at::kFloat)
                              : value.toTensor().detach().to(at::kFloat);
}

void ClientStates::set_local(int param, const std::string& key, const at::Tensor& part) const {
  core_.layout().check_trained(param, "set_local");
  const State state = kept_.state(param);
  const Kind kind = kind_of(param, state, key);
  refuse(kind, key, state);
  if (kind == Kind::Nothing) {
    TESSERA_CHECK_VALUE(part.numel() == 0, "state", "this rank has no state '", key, "' of this parameter");
    return;
  }
  check(key, part);
  const int64_t size = kind == Kind::Number ? 1 : state.at(key).toTensor().numel();
  TESSERA_CHECK_VALUE(part.numel() == size, "state", "state '", key, "' has ", size, " values here, not ",
                      part.numel());
  kept_.write_state(param, key, part);
}

}  // namespace tessera::engine

// States of an optimizer that updates the masters itself, by parameter and key, as engine::OptimizerStates has the core's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "tessera/engine/engine.h"
#include "tessera/nn/client_optimizer.h"

namespace tessera::nn {

// Full values are fp32 in the shape of the parameter, a number ("step") a tensor without dimensions; undefined before the
// optimizer's first step. Value error for a missing key, and for a state that is neither a number nor a value for each element.
// Full values are collective: what a state is has to be agreed upon, as a rank without a part of the parameter has none.
class ClientStates {
 public:
  ClientStates(engine::Engine& core, ClientOptimizer& optimizer) : core_(core), optimizer_(optimizer) {}
  at::Tensor get_full(int param, const std::string& key) const;
  void set_full(int param, const std::string& key, const at::Tensor& full) const;
  at::Tensor get_local(int param, const std::string& key) const;
  void set_local(int param, const std::string& key, const at::Tensor& part) const;

 private:
  enum class Kind : uint8_t { Nothing, Number, Part, Other, Unknown };  // the largest of all ranks' kinds holds
  using State = ClientOptimizer::State;
  Kind kind_of(int param, const State& state, const std::string& key) const;
  Kind agreed(int param, const State& state, const std::string& key) const;
  void refuse(Kind kind, const std::string& key, const State& state) const;
  void put(int param, State state, const std::string& key, const at::Tensor& part) const;

  engine::Engine& core_;
  ClientOptimizer& optimizer_;
};

}  // namespace tessera::nn

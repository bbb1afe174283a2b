// Values of an engine's parameters: fp32 masters, gradients, optimizer states, whole and as this rank has them.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <utility>

#include "tessera/engine/engine.h"
#include "tessera/nn/client_optimizer.h"

namespace tessera::nn {

// A parameter of a module: itself, or one of its names.
struct ParamKey {
  ParamKey(at::Tensor param) : tensor(std::move(param)) {}           // NOLINT(google-explicit-constructor)
  ParamKey(std::string name_of_it) : name(std::move(name_of_it)) {}  // NOLINT(google-explicit-constructor)
  ParamKey(const char* name_of_it) : name(name_of_it) {}             // NOLINT(google-explicit-constructor)
  at::Tensor tensor;
  std::string name;
};

// Full values are fp32, in the shape of the parameter (for one cut along tp: of the whole); reading and writing them is
// collective. Local ones are what this rank holds, fp32: shaped like the parameter at stage 0, else 1-D and possibly empty; views
// where values are held so. Missing values are undefined: those of parameters that are not optimized, gradients outside the time
// between a backward and its step. A parameter that waits to be trained joins with the first collective call for it. Value error
// for what is no parameter, and for a write where there is nothing of this kind.
class ReadStates {
 public:
  // `client`: the optimizer that keeps the states in the core's place, or null.
  ReadStates(engine::Engine& core, const torch::nn::Module& module, ClientOptimizer* client = nullptr)
      : core_(core), module_(module), client_(client) {}

  at::Tensor full_param(const ParamKey& param) const;
  // As step() will use it, before clipping; before its reduction this rank's own.
  at::Tensor full_grad(const ParamKey& param) const;
  // `key` as in torch's optimizer state: "exp_avg", "step" (engine::OptimizerStates; engine::ClientStates where an optimizer runs
  // itself, which makes its states in its first step).
  at::Tensor full_state(const ParamKey& param, const std::string& key) const;

  int number(const ParamKey& param) const;  // in engine::Engine::params(). Local.
  // Of the flattened parameter: [begin, end). Local.
  std::pair<int64_t, int64_t> local_range(const ParamKey& param) const;
  at::Tensor local_param(const ParamKey& param) const;
  at::Tensor local_grad(const ParamKey& param) const;
  at::Tensor local_state(const ParamKey& param, const std::string& key) const;

 protected:
  int joined(const ParamKey& param) const;
  bool trained(int number) const { return core_.params()[number].group >= 0; }
  at::Tensor local(const ParamKey& param, engine::Quantity what) const;

  engine::Engine& core_;
  const torch::nn::Module& module_;
  ClientOptimizer* client_;
};

// The same, and writes.
class States : public ReadStates {
 public:
  States(engine::Engine& core, const torch::nn::Module& module, ClientOptimizer* client = nullptr)
      : ReadStates(core, module, client) {}

  void set_full_param(const ParamKey& param, const at::Tensor& value) const;  // the master, and the parameter itself
  void set_full_grad(const ParamKey& param, const at::Tensor& value) const;
  void set_full_state(const ParamKey& param, const std::string& key, const at::Tensor& value) const;
  // Collective: the parameter is refreshed on all ranks.
  void set_local_param(const ParamKey& param, const at::Tensor& value) const;
  void set_local_grad(const ParamKey& param, const at::Tensor& value) const;
  void set_local_state(const ParamKey& param, const std::string& key, const at::Tensor& value) const;
};

}  // namespace tessera::nn

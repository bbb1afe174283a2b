// The hyper-parameters of a group, by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/optim/optimizer.h"

namespace tessera::engine {

// A hyper-parameter of a client's optimizer that lies on the device, where the host does not wait for it.
struct DeviceTerm {
  std::string name, where;  // "lr", "in param group 0"
  at::Tensor value;         // of one element
};

template <class G, class F>
void each_field(G& group, const F& f) {
  f("lr", group.lr);
  f("beta1", group.beta1);
  f("beta2", group.beta2);
  f("eps", group.eps);
  f("weight_decay", group.weight_decay);
  f("decoupled", group.decoupled);
  f("bias_correction", group.bias_correction);
  f("momentum", group.momentum);
  f("dampening", group.dampening);
  f("nesterov", group.nesterov);
  f("lr_decay", group.lr_decay);
  f("initial_accumulator_value", group.initial_accumulator_value);
  f("maximize", group.maximize);
}

// Why a saved value of this name ("betas" or "beta1" and "beta2") is none that a group was built with; empty where it may be one.
std::string wrong_field(const std::string& name, double value);

}  // namespace tessera::engine

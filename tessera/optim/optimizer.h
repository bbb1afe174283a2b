// Optimizers over local flat shards: hyper-parameters per group, and one fused update per range.
// Knows no units, modules or stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <vector>

#include "tessera/kernels/types.h"

namespace tessera::optim {

enum class Rule {
  Adam,  // Adam and AdamW (GroupOptions::decoupled)
  Sgd,
  Lion,
  Adagrad,
  External,  // a client's optimizer updates the master shards itself
  Lamb,  // this and the rest for whole parameters (whole.h): there is no kernel, and an engine runs them as External
  Muon,
  Adafactor,
};

inline constexpr double kOfDtype = -1;

// Hyper-parameters of one param group; a rule reads those that it knows. Names are torch's; defaults those of configurations
// (docs/config.md), where AdamW decays nothing unless asked to.
struct GroupOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;  // Adam, Lion, Lamb, Muon
  double eps = 1e-8;                  // Adam, Adagrad, Lamb, Muon, Adafactor, torch's RMSprop
  double weight_decay = 0;
  bool decoupled = true;                 // Adam: true is AdamW
  bool bias_correction = true;           // Adam, Lamb
  double momentum = 0, dampening = 0;    // SGD; momentum: Muon and torch's RMSprop, too
  bool nesterov = false;                 // SGD, Muon
  double lr_decay = 0;                   // Adagrad
  double initial_accumulator_value = 0;  // Adagrad
  bool maximize = false;
  double max_coeff = 10, min_coeff = 0.01;  // Lamb: bounds of a parameter's own factor of the rate
  bool eps_inside_sqrt = false;             // Lamb
  int64_t ns_steps = 5;                     // Muon: steps of its iteration
  bool use_muon = true;                     // Muon: matrices; false: updated as by AdamW, or Adam (`decoupled`)
  double alpha = 0.99;                      // torch's RMSprop; ASGD: the power of its rate
  bool centered = false;                    // torch's RMSprop
  bool amsgrad = false;                     // torch's Adam and AdamW
  double lambd = 1e-4, t0 = 1e6;            // ASGD
  double eta_minus = 0.5, eta_plus = 1.2, step_size_min = 1e-6, step_size_max = 50;  // Rprop
  double beta2_decay = -0.8, d = 1;                                                  // Adafactor
  double eps1 =
      kOfDtype;  // Adafactor, beside `eps`; torch's None: the smallest difference from 1 of the parameter's dtype

  bool operator==(const GroupOptions&) const = default;
};

// Names of the state tensors of a rule in torch's terms, e.g. {"exp_avg", "exp_avg_sq"}. At most 2. Muon's are those of the first
// group.
struct StateNames {
  std::array<const char*, 2> name{};
  int count = 0;
};
StateNames state_names(Rule rule, const std::vector<GroupOptions>& groups);
// The value of every element of a state before the first update.
double initial_state(Rule rule, const GroupOptions& group);

// A range of a shard that shares a group and a step count. Tensors are 1-D, contiguous, of equal
// length, on one device. The tensors that are there say where the master weights are (kernels/update.h):
//   master                fp32, the compute weights too
//   master, weight        fp32, and a 16-bit copy for compute, rounded to nearest
//   weight, residual      split: together the exact fp32 master
//   weight                16 bits are the master
struct UpdateSlice {
  at::Tensor master;                // fp32
  at::Tensor residual;              // int16, beside a bf16 weight
  at::Tensor weight;                // bf16 or fp16
  bool adopts = false;              // beside an fp32 master: weights that are not the master's rounding are the master
  at::Tensor grad;                  // fp32, bf16 or fp16
  std::array<at::Tensor, 2> state;  // all fp32 or all bf16
  // How a weight that is its own master and bf16 states are rounded; Stochastic by the bits of `random`, whose `first`
  // is the global index of the slice's element 0.
  kernels::Rounding rounding = kernels::Rounding::Nearest;
  kernels::RandomKey random;
  // The elements' indices are `run` from `first` on, then as many `stride` further on, and so on (the columns of a matrix). 0:
  // one run.
  int64_t run = 0, stride = 0;
};

// A slice with its group's hyper-parameters. `step` counts from 1.
struct Update {
  const GroupOptions* group;
  int64_t step;
  UpdateSlice slice;
};

// Makes one fused pass over each: g = grad * grad_scale, update weights and state. Slices have no element in common. Slices on a
// device share launches, as far as they are of one form. Multi-threaded; the bits do not depend on the number of threads,
// nor on how a shard is cut into slices. Nothing is changed where a slice does not fit.
void update(Rule rule, const std::vector<Update>& updates, double grad_scale);
void update(Rule rule, const GroupOptions& group, int64_t step, const UpdateSlice& slice, double grad_scale);

}  // namespace tessera::optim

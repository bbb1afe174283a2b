// Updates of tensors as a program has them: what optimizers without an engine run.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

// Why a program's optimizer cannot update a parameter that has a gradient: a kernel's rule one of another dtype, or with `on_cpu_only`
// on a device; any one with a sparse gradient. Empty where it can.
std::string wrong_param(Rule rule, bool on_cpu_only, const at::Tensor& param);

// A parameter that is its own master: read as fp32, updated in one pass, rounded to its dtype. All tensors have one shape and
// device and are strided.
struct TensorUpdate {
  at::Tensor param;                 // fp32, bf16 or fp16
  at::Tensor grad;                  // fp32, bf16 or fp16
  std::array<at::Tensor, 2> state;  // the rule's states, fp32; beside fp32 and bf16 parameters also bf16
  int64_t step = 1;                 // number of this parameter's update, from 1
  uint64_t first = 0;               // number of its first element, for the random bits
};

// Updates each tensor. Value error before anything is changed if one does not fit. Tensors whose elements lie in memory in
// the parameter's order are read and written where they are; others, and parameters with gaps between their elements,
// pass through a copy. `seed`: of stochastic rounding.
void update_tensors(Rule rule, const GroupOptions& group, const std::vector<TensorUpdate>& tensors,
                    kernels::Rounding rounding, uint64_t seed);

}  // namespace tessera::optim

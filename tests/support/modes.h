// Test support: the precision modes that configurations can ask for, and nearest rounding in place of stochastic.
#pragma once

#include <vector>

#include "tessera/amp/precision.h"

namespace tessera::testing {

// Weights and gradients of one dtype.
inline amp::PrecisionPolicy mode(at::ScalarType param, amp::Master master, at::ScalarType state,
                                 kernels::Rounding rounding = kernels::Rounding::Stochastic) {
  amp::PrecisionPolicy policy{param, param, master, state};
  policy.rounding = rounding;
  return policy;
}

inline std::vector<amp::PrecisionPolicy> all_modes() {
  using amp::Master;
  return {amp::PrecisionPolicy::fp32(),
          mode(at::kBFloat16, Master::Fp32, at::kFloat),
          mode(at::kBFloat16, Master::Split, at::kFloat),
          mode(at::kBFloat16, Master::Weight, at::kFloat),
          mode(at::kBFloat16, Master::Split, at::kBFloat16),
          mode(at::kBFloat16, Master::Weight, at::kBFloat16),
          mode(at::kBFloat16, Master::Weight, at::kBFloat16, kernels::Rounding::Nearest),
          mode(at::kHalf, Master::Fp32, at::kFloat),
          mode(at::kHalf, Master::Weight, at::kFloat)};
}

}  // namespace tessera::testing

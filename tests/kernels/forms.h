// The forms of model states that one update pass serves: the list behind tests and benchmarks.
#pragma once

#include <string>
#include <vector>

#include "tessera/kernels/update.h"

namespace tessera::kernels::testing {

// Where the master weights are, as in update.h.
struct MasterForm {
  const char* name;
  bool master, residual, weight;
  DType weight_dtype;
  bool adopts = false;
};
constexpr MasterForm kMasterForms[] = {
    {"fp32", true, false, false, DType::BF16},
    {"fp32+bf16", true, false, true, DType::BF16},
    {"fp32+fp16", true, false, true, DType::F16},
    {"split", false, true, true, DType::BF16},
    {"bf16_alone", false, false, true, DType::BF16},
    {"fp16_alone", false, false, true, DType::F16},
    {"fp32+bf16_adopted", true, false, true, DType::BF16, true},
    {"fp32+fp16_adopted", true, false, true, DType::F16, true},
};

struct Form {
  MasterForm master;
  DType state_dtype;
  Rounding rounding;

  std::string name() const {
    return std::string(master.name) + (state_dtype == DType::F32 ? "/fp32_states" : "/bf16_states") +
           (rounding == Rounding::Nearest ? "" : "/stochastic");
  }
  bool draws(int states) const {
    const bool alone = !master.master && !master.residual;
    return rounding == Rounding::Stochastic && (alone || (states > 0 && state_dtype == DType::BF16));
  }
};

// All that UpdateRange may describe, also those where stochastic rounding has nothing to round.
inline std::vector<Form> forms() {
  std::vector<Form> list;
  for (const MasterForm& master : kMasterForms) {
    for (DType state : {DType::F32, DType::BF16}) {
      if (master.weight && master.weight_dtype == DType::F16 && state == DType::BF16) continue;
      for (Rounding rounding : {Rounding::Nearest, Rounding::Stochastic})
        list.push_back({master, state, rounding});
    }
  }
  return list;
}

}  // namespace tessera::kernels::testing

#include "tessera/amp/precision.h"

#include "tessera/base/error.h"

namespace tessera::amp {

void check(const PrecisionPolicy& policy) {
  const auto [param, grad, master, state, rounding, grad_rounding, skip_nonfinite] = policy;
  TESSERA_CHECK_VALUE(param == at::kFloat || param == at::kBFloat16 || param == at::kHalf, "amp.precision",
                      "param must be fp32, bf16 or fp16, got ", param);
  TESSERA_CHECK_VALUE(grad == at::kFloat || grad == at::kBFloat16 || grad == at::kHalf, "amp.precision",
                      "grad must be fp32, bf16 or fp16, got ", grad);
  TESSERA_CHECK_VALUE(param != at::kFloat || master == Master::Weight, "amp.precision",
                      "fp32 parameters are their own masters: master must be Weight");
  TESSERA_CHECK_VALUE(param == at::kBFloat16 || master != Master::Split, "amp.precision",
                      "only bf16 parameters can be split, not ", param, ": master must be Fp32 or Weight");
  TESSERA_CHECK_VALUE(state == at::kFloat || state == at::kBFloat16, "amp.precision",
                      "state must be fp32 or bf16, got ", state);
  TESSERA_CHECK_VALUE(state == at::kFloat || param != at::kHalf, "amp.precision",
                      "fp16 parameters go with fp32 states: state must be fp32");
}

}  // namespace tessera::amp

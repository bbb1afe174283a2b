// Update rules: update_element() of element.h, one thread an element.
#include "tessera/kernels/cuda/cuda.h"
#include "tessera/kernels/cuda/launch.cuh"
#include "tessera/kernels/element.h"
#include "tessera/kernels/rules.h"

namespace tessera::kernels::cuda {
namespace {

enum class Master { Fp32, Split, Weight };

// What is known when a kernel is compiled is written over the range, so that the branches on it go.
template <class Rule, Master master, DType state, Rounding rounding>
struct Update {
  Rule rule;
  UpdateRange range;
  float grad_scale;
  StepKey key;

  __device__ void operator()(int64_t i) const {
    UpdateRange r = range;
    if (master != Master::Fp32) r.master = nullptr;
    if (master != Master::Split) r.residual = nullptr;
    if (master == Master::Fp32) __builtin_assume(r.master != nullptr);
    if (master == Master::Split) __builtin_assume(r.residual != nullptr);
    r.state_dtype = state;
    r.rounding = rounding;
    update_element(rule, r, grad_scale, key, i);
  }
};

template <Master master, DType state, Rounding rounding, class Rule>
void launch_typed(const Rule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  launch(range.n, stream, Update<Rule, master, state, rounding>{rule, range, grad_scale, step_key(range.random)});
}

template <Master master, class Rule>
void launch_master(const Rule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  const bool stochastic = range.rounding == Rounding::Stochastic;
  if constexpr (Rule::states > 0) {
    if (range.state_dtype == DType::BF16) {
      if (stochastic) return launch_typed<master, DType::BF16, Rounding::Stochastic>(rule, range, grad_scale, stream);
      return launch_typed<master, DType::BF16, Rounding::Nearest>(rule, range, grad_scale, stream);
    }
  }
  if (stochastic) return launch_typed<master, DType::F32, Rounding::Stochastic>(rule, range, grad_scale, stream);
  launch_typed<master, DType::F32, Rounding::Nearest>(rule, range, grad_scale, stream);
}

template <class Rule>
void launch_update(const Rule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  if (range.master != nullptr) return launch_master<Master::Fp32>(rule, range, grad_scale, stream);
  if (range.residual != nullptr) return launch_master<Master::Split>(rule, range, grad_scale, stream);
  launch_master<Master::Weight>(rule, range, grad_scale, stream);
}

}  // namespace

void update(const AdamRule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  launch_update(AdamElement(rule), range, grad_scale, stream);
}
void update(const SgdRule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  if (rule.momentum == 0) return launch_update(SgdElement(rule), range, grad_scale, stream);
  launch_update(MomentumElement(rule), range, grad_scale, stream);
}
void update(const LionRule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  launch_update(LionElement(rule), range, grad_scale, stream);
}
void update(const AdagradRule& rule, const UpdateRange& range, float grad_scale, void* stream) {
  launch_update(AdagradElement(rule), range, grad_scale, stream);
}

}  // namespace tessera::kernels::cuda

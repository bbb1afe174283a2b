// Update rules: one pass that unscales and clips the gradient, updates master weights and state,
// and writes the compute weights. Serial over the given range; callers split ranges over threads.
// The functions run the best version for this processor (table.h); every version gives the bits of
// the plain reference.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// One range of a flat shard, n elements each. Any alignment. The master weights are, in and out, one of
//   master               fp32, which is the compute weight too
//   master, and weight   fp32, and a 16-bit copy of it for compute (out, nearest even; `adopts`: also in, see there)
//   weight and residual  a bf16 weight and 16 bits that together are the exact fp32 value (Note [Split master], convert.h)
//   weight               16 bits, rounded as `rounding` says
struct UpdateRange {
  int64_t n = 0;
  float* master = nullptr;
  void* residual = nullptr;
  void* weight = nullptr;
  DType weight_dtype = DType::BF16;  // BF16 or F16
  // Master and weight: where the weight is not the master's rounding, somebody has written to it, and it is the master.
  bool adopts = false;
  const void* grad = nullptr;  // in
  DType grad_dtype = DType::F32;
  void* state0 = nullptr;          // Adam, Lion: exp_avg. SGD: momentum_buffer. Adagrad: sum
  void* state1 = nullptr;          // Adam: exp_avg_sq
  DType state_dtype = DType::F32;  // F32; where no weight is F16 also BF16, rounded as `rounding` says
  Rounding rounding = Rounding::Nearest;
  RandomKey random;  // where rounding is Stochastic
};

// Elements [begin, end) of a range.
TESSERA_ELEMENT UpdateRange part(const UpdateRange& range, int64_t begin, int64_t end) {
  const auto at = [=](const void* p, DType dtype) {
    const auto offset = begin * static_cast<int64_t>(size_of(dtype));
    return p == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(p)) + offset;
  };
  UpdateRange r = range;
  r.n = end - begin;
  if (r.master != nullptr) r.master += begin;
  r.residual = at(r.residual, DType::BF16);
  r.weight = at(r.weight, r.weight_dtype);
  r.grad = at(r.grad, r.grad_dtype);
  r.state0 = at(r.state0, r.state_dtype);
  r.state1 = at(r.state1, r.state_dtype);
  r.random.first += static_cast<uint64_t>(begin);
  return r;
}

// Every rule first forms g = grad * grad_scale in fp32 (1/loss scale, clip coefficient; negative to
// maximize).

// Adam (Kingma & Ba, arXiv:1412.6980), AdamW (Loshchilov & Hutter, arXiv:1711.05101); arithmetic of
// torch.optim.Adam(W):
//   decoupled: w *= 1 - lr*weight_decay, else g += weight_decay*w
//   m += (1-beta1)(g-m);  v = beta2*v + (1-beta2)*g*g;  w -= step_size * m / (sqrt(v)/sqrt_bias2 +
//   eps)
struct AdamRule {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled = true;
  double bias1 = 1,
         sqrt_bias2 = 1;  // 1-beta1^t and sqrt(1-beta2^t) in double; 1 without bias correction
};
// torch.optim.SGD: g += weight_decay*w; buf = momentum*buf + (1-dampening)*g (first step: buf = g);
//   g = nesterov ? g + momentum*buf : buf;  w -= lr*g. momentum == 0: no state is touched.
struct SgdRule {
  double lr, momentum, dampening, weight_decay;
  bool nesterov = false, first_step = false;
};
// Lion (Chen et al., arXiv:2302.06675): w *= 1 - lr*weight_decay; w -= lr*sign(beta1*m +
// (1-beta1)*g);
//   m = beta2*m + (1-beta2)*g. sign(0) = 0.
struct LionRule {
  double lr, beta1, beta2, weight_decay;
};
// torch.optim.Adagrad: g += weight_decay*w; sum += g*g; w -= clr * g / (sqrt(sum) + eps),
//   clr = lr / (1 + (t-1)*lr_decay), computed by the caller.
struct AdagradRule {
  double clr, eps, weight_decay;
};

void update(const AdamRule& rule, const UpdateRange& range, float grad_scale);
void update(const SgdRule& rule, const UpdateRange& range, float grad_scale);
void update(const LionRule& rule, const UpdateRange& range, float grad_scale);
void update(const AdagradRule& rule, const UpdateRange& range, float grad_scale);

}  // namespace tessera::kernels

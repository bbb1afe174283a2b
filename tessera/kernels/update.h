// Update rules: one pass that unscales and clips the gradient, updates master weights and state,
// and writes the compute weights. Serial over the given range; callers split ranges over threads.
// The functions run the best version for this processor (table.h); every version gives the bits of
// the plain reference.
#pragma once

#include <cstdint>

#include "tessera/kernels/types.h"

namespace tessera::kernels {

// One range of a flat shard, n elements each. Any alignment.
struct UpdateRange {
  int64_t n = 0;
  float* master = nullptr;           // fp32 master weights, in and out
  void* weight = nullptr;            // compute weights, out; null where the master is the compute weight
  DType weight_dtype = DType::BF16;  // BF16 or F16, round to nearest even
  const void* grad = nullptr;        // in
  DType grad_dtype = DType::F32;
  float* state0 = nullptr;  // Adam, Lion: exp_avg. SGD: momentum_buffer. Adagrad: sum
  float* state1 = nullptr;  // Adam: exp_avg_sq
};

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

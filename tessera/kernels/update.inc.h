// Update rules over vectors. The arithmetic and its order are those of reference.cpp, so the bits
// are too.
#pragma once

#include "tessera/kernels/table.h"
#include "tessera/kernels/update.h"
#include "tessera/kernels/vec.inc.h"

namespace tessera::kernels {
namespace {

// Each rule holds its constants and maps (w, g, state) of one vector to their new values.
struct AdamStep {
  static constexpr int states = 2;
  F decay, l2, mix, beta2, rest2, sqrt_bias2, eps, minus_step_size;
  bool add_l2, mix_from_grad;

  explicit AdamStep(const AdamRule& r)
      : decay(splat(static_cast<float>(r.decoupled ? 1 - r.lr * r.weight_decay : 1))),
        l2(splat(static_cast<float>(r.weight_decay))),
        beta2(splat(static_cast<float>(r.beta2))),
        rest2(splat(static_cast<float>(1 - r.beta2))),
        sqrt_bias2(splat(static_cast<float>(r.sqrt_bias2))),
        eps(splat(static_cast<float>(r.eps))),
        minus_step_size(splat(static_cast<float>(-(r.lr / r.bias1)))),
        add_l2(!r.decoupled && static_cast<float>(r.weight_decay) != 0) {
    const float rest1 = static_cast<float>(1 - r.beta1);
    mix_from_grad = !(rest1 < 0.5f);
    mix = splat(mix_from_grad ? rest1 - 1.0f : rest1);
  }
  TESSERA_INLINE void apply(F& w, F g, F& m, F& v) const {
    w = w * decay;
    if (add_l2) g = fma(l2, w, g);
    m = fma(mix, g - m, mix_from_grad ? g : m);
    v = fma(rest2 * g, g, v * beta2);
    w = w + (minus_step_size * m) / (square_root(v) / sqrt_bias2 + eps);
  }
};

struct SgdStep {
  static constexpr int states = 0;
  F l2, minus_lr;
  bool add_l2;

  explicit SgdStep(const SgdRule& r)
      : l2(splat(static_cast<float>(r.weight_decay))),
        minus_lr(splat(static_cast<float>(-r.lr))),
        add_l2(static_cast<float>(r.weight_decay) != 0) {}
  TESSERA_INLINE void apply(F& w, F g, F&, F&) const {
    if (add_l2) g = fma(l2, w, g);
    w = fma(minus_lr, g, w);
  }
};

struct MomentumStep {
  static constexpr int states = 1;
  F l2, minus_lr, momentum, undamped;
  bool add_l2, nesterov, first;

  explicit MomentumStep(const SgdRule& r)
      : l2(splat(static_cast<float>(r.weight_decay))),
        minus_lr(splat(static_cast<float>(-r.lr))),
        momentum(splat(static_cast<float>(r.momentum))),
        undamped(splat(static_cast<float>(1 - r.dampening))),
        add_l2(static_cast<float>(r.weight_decay) != 0),
        nesterov(r.nesterov),
        first(r.first_step) {}
  TESSERA_INLINE void apply(F& w, F g, F& buf, F&) const {
    if (add_l2) g = fma(l2, w, g);
    buf = first ? g : fma(undamped, g, buf * momentum);
    w = fma(minus_lr, nesterov ? fma(momentum, buf, g) : buf, w);
  }
};

struct LionStep {
  static constexpr int states = 1;
  F decay, beta1, rest1, beta2, rest2, lr;

  explicit LionStep(const LionRule& r)
      : decay(splat(static_cast<float>(1 - r.lr * r.weight_decay))),
        beta1(splat(static_cast<float>(r.beta1))),
        rest1(splat(static_cast<float>(1 - r.beta1))),
        beta2(splat(static_cast<float>(r.beta2))),
        rest2(splat(static_cast<float>(1 - r.beta2))),
        lr(splat(static_cast<float>(r.lr))) {}
  TESSERA_INLINE void apply(F& w, F g, F& m, F&) const {
    const F zero = splat(0.0f);
    const F blend = fma(rest1, g, m * beta1);
    w = w * decay - (blend > zero ? lr : (blend < zero ? -lr : zero));
    m = fma(rest2, g, m * beta2);
  }
};

struct AdagradStep {
  static constexpr int states = 1;
  F l2, minus_clr, eps;
  bool add_l2;

  explicit AdagradStep(const AdagradRule& r)
      : l2(splat(static_cast<float>(r.weight_decay))),
        minus_clr(splat(static_cast<float>(-r.clr))),
        eps(splat(static_cast<float>(r.eps))),
        add_l2(static_cast<float>(r.weight_decay) != 0) {}
  TESSERA_INLINE void apply(F& w, F g, F& sum, F&) const {
    if (add_l2) g = fma(l2, w, g);
    sum = fma(g, g, sum);
    w = w + (minus_clr * g) / (square_root(sum) + eps);
  }
};

template <class Grad, class Weight, class Step>
void update_typed(const Step& rule, const UpdateRange& range, float grad_scale) {
  // Local copies: a store through a char pointer could change the originals for all the compiler
  // knows.
  const Step step = rule;
  const F scale = splat(grad_scale);
  float* const master = range.master;
  void* const weight = range.weight;
  const void* const grad = range.grad;
  void* const state0 = range.state0;
  void* const state1 = range.state1;
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    F32::prefetch(master, i);
    Grad::prefetch(grad, i);
    Weight::prefetch(weight, i);
    if constexpr (Step::states > 0) F32::prefetch(state0, i);
    if constexpr (Step::states > 1) F32::prefetch(state1, i);
  };
  for_each_vector(range.n, prefetch, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
    F w = F32::load(master, i, lanes), s0{}, s1{};
    const F g = Grad::load(grad, i, lanes) * scale;
    if constexpr (Step::states > 0) s0 = F32::load(state0, i, lanes);
    if constexpr (Step::states > 1) s1 = F32::load(state1, i, lanes);
    step.apply(w, g, s0, s1);
    F32::store(master, i, lanes, w);
    if constexpr (Step::states > 0) F32::store(state0, i, lanes, s0);
    if constexpr (Step::states > 1) F32::store(state1, i, lanes, s1);
    Weight::store(weight, i, lanes, w);
  });
}

template <class Step>
void update_any(const Step& step, const UpdateRange& range, float grad_scale) {
  with_type(range.grad_dtype, [&](auto grad) {
    using Grad = decltype(grad);
    if (range.weight == nullptr) return update_typed<Grad, None>(step, range, grad_scale);
    if (range.weight_dtype == DType::BF16) return update_typed<Grad, Bf16>(step, range, grad_scale);
    update_typed<Grad, F16>(step, range, grad_scale);
  });
}

void adam(const AdamRule& rule, const UpdateRange& range, float grad_scale) {
  if (range.master == nullptr || range.state_dtype != DType::F32)
    return reference_table().adam(rule, range, grad_scale);
  update_any(AdamStep(rule), range, grad_scale);
}
void sgd(const SgdRule& rule, const UpdateRange& range, float grad_scale) {
  if (range.master == nullptr || range.state_dtype != DType::F32) return reference_table().sgd(rule, range, grad_scale);
  if (rule.momentum == 0) return update_any(SgdStep(rule), range, grad_scale);
  update_any(MomentumStep(rule), range, grad_scale);
}
void lion(const LionRule& rule, const UpdateRange& range, float grad_scale) {
  if (range.master == nullptr || range.state_dtype != DType::F32)
    return reference_table().lion(rule, range, grad_scale);
  update_any(LionStep(rule), range, grad_scale);
}
void adagrad(const AdagradRule& rule, const UpdateRange& range, float grad_scale) {
  if (range.master == nullptr || range.state_dtype != DType::F32)
    return reference_table().adagrad(rule, range, grad_scale);
  update_any(AdagradStep(rule), range, grad_scale);
}

}  // namespace
}  // namespace tessera::kernels

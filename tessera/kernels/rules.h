// The update rules of one element, in the order of operations that every version keeps: products and sums are fused
// (std::fma) exactly where torch's CPU operators fuse them. Shared by the reference and by CUDA; both are compiled
// without contraction.
#pragma once

#include <cmath>

#include "tessera/kernels/update.h"

namespace tessera::kernels {

// A rule in fp32: how many `states` it keeps, and apply(w, g, s0, s1) from old values to new ones. g is scaled already.
struct AdamElement {
  static constexpr int states = 2;
  float decay, weight_decay, rest1, beta2, rest2, sqrt_bias2, eps, step_size;
  bool decoupled;

  AdamElement() = default;
  explicit AdamElement(const AdamRule& rule)
      : decay(static_cast<float>(1 - rule.lr * rule.weight_decay)),
        weight_decay(static_cast<float>(rule.weight_decay)),
        rest1(static_cast<float>(1 - rule.beta1)),
        beta2(static_cast<float>(rule.beta2)),
        rest2(static_cast<float>(1 - rule.beta2)),
        sqrt_bias2(static_cast<float>(rule.sqrt_bias2)),
        eps(static_cast<float>(rule.eps)),
        step_size(static_cast<float>(rule.lr / rule.bias1)),
        decoupled(rule.decoupled) {}

  bool operator==(const AdamElement&) const = default;

  TESSERA_ELEMENT void apply(float& w, float g, float& m, float& v) const {
    if (weight_decay != 0) {
      if (decoupled) {
        w *= decay;
      } else {
        g = std::fma(weight_decay, w, g);
      }
    }
    // torch.lerp begins at the nearer end.
    const float way = g - m;
    m = rest1 < 0.5f ? std::fma(rest1, way, m) : std::fma(rest1 - 1.0f, way, g);
    v = std::fma(rest2 * g, g, v * beta2);
    const float denominator = std::sqrt(v) / sqrt_bias2 + eps;
    w += (-step_size * m) / denominator;
  }
};

// SGD without momentum.
struct SgdElement {
  static constexpr int states = 0;
  float lr, weight_decay;

  SgdElement() = default;
  explicit SgdElement(const SgdRule& rule)
      : lr(static_cast<float>(rule.lr)), weight_decay(static_cast<float>(rule.weight_decay)) {}

  bool operator==(const SgdElement&) const = default;

  TESSERA_ELEMENT void apply(float& w, float g, float&, float&) const {
    if (weight_decay != 0) g = std::fma(weight_decay, w, g);
    w = std::fma(-lr, g, w);
  }
};

struct MomentumElement {
  static constexpr int states = 1;
  float lr, weight_decay, momentum, undamped;
  bool nesterov, first_step;

  MomentumElement() = default;
  explicit MomentumElement(const SgdRule& rule)
      : lr(static_cast<float>(rule.lr)),
        weight_decay(static_cast<float>(rule.weight_decay)),
        momentum(static_cast<float>(rule.momentum)),
        undamped(static_cast<float>(1 - rule.dampening)),
        nesterov(rule.nesterov),
        first_step(rule.first_step) {}

  bool operator==(const MomentumElement&) const = default;

  TESSERA_ELEMENT void apply(float& w, float g, float& buffer, float&) const {
    if (weight_decay != 0) g = std::fma(weight_decay, w, g);
    buffer = first_step ? g : std::fma(undamped, g, buffer * momentum);
    g = nesterov ? std::fma(momentum, buffer, g) : buffer;
    w = std::fma(-lr, g, w);
  }
};

struct LionElement {
  static constexpr int states = 1;
  float lr, decay, beta1, rest1, beta2, rest2;

  LionElement() = default;
  explicit LionElement(const LionRule& rule)
      : lr(static_cast<float>(rule.lr)),
        decay(static_cast<float>(1 - rule.lr * rule.weight_decay)),
        beta1(static_cast<float>(rule.beta1)),
        rest1(static_cast<float>(1 - rule.beta1)),
        beta2(static_cast<float>(rule.beta2)),
        rest2(static_cast<float>(1 - rule.beta2)) {}

  bool operator==(const LionElement&) const = default;

  TESSERA_ELEMENT void apply(float& w, float g, float& m, float&) const {
    const float blend = std::fma(rest1, g, m * beta1);
    const float sign = blend > 0 ? 1.0f : (blend < 0 ? -1.0f : 0.0f);
    w = w * decay - lr * sign;
    m = std::fma(rest2, g, m * beta2);
  }
};

struct AdagradElement {
  static constexpr int states = 1;
  float clr, eps, weight_decay;

  AdagradElement() = default;
  explicit AdagradElement(const AdagradRule& rule)
      : clr(static_cast<float>(rule.clr)),
        eps(static_cast<float>(rule.eps)),
        weight_decay(static_cast<float>(rule.weight_decay)) {}

  bool operator==(const AdagradElement&) const = default;

  TESSERA_ELEMENT void apply(float& w, float g, float& sum, float&) const {
    if (weight_decay != 0) g = std::fma(weight_decay, w, g);
    sum = std::fma(g, g, sum);
    w = w + (-clr * g) / (std::sqrt(sum) + eps);
  }
};

}  // namespace tessera::kernels

// The plain scalar kernels: the truth that every vector version must match bit for bit, and the
// last resort. Products and sums are fused (std::fma) exactly where torch's CPU operators fuse
// them.
#include <cmath>
#include <cstring>

#include "tessera/kernels/convert.h"
#include "tessera/kernels/table.h"

namespace tessera::kernels {
namespace {

float load(const void* p, DType dtype, int64_t i) {
  if (dtype == DType::F32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(p) + 4 * i, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, static_cast<const char*>(p) + 2 * i, 2);
  return dtype == DType::BF16 ? float_from_bf16(half) : float_from_f16(half);
}

void store(void* p, DType dtype, int64_t i, float value) {
  if (dtype == DType::F32) {
    std::memcpy(static_cast<char*>(p) + 4 * i, &value, 4);
    return;
  }
  const uint16_t half = dtype == DType::BF16 ? bf16_from_float(value) : f16_from_float(value);
  std::memcpy(static_cast<char*>(p) + 2 * i, &half, 2);
}

float load(const float* p, int64_t i) {
  return load(p, DType::F32, i);
}
void store(float* p, int64_t i, float value) {
  store(p, DType::F32, i, value);
}

void store_weight(const UpdateRange& range, int64_t i, float w) {
  store(range.master, i, w);
  if (range.weight != nullptr) store(range.weight, range.weight_dtype, i, w);
}

// torch.lerp: from the nearer end.
float lerp(float from, float to, float weight) {
  const float way = to - from;
  return weight < 0.5f ? std::fma(weight, way, from) : std::fma(weight - 1.0f, way, to);
}

void adam(const AdamRule& rule, const UpdateRange& range, float grad_scale) {
  const auto decay = static_cast<float>(1 - rule.lr * rule.weight_decay);
  const auto weight_decay = static_cast<float>(rule.weight_decay);
  const auto rest1 = static_cast<float>(1 - rule.beta1);
  const auto beta2 = static_cast<float>(rule.beta2);
  const auto rest2 = static_cast<float>(1 - rule.beta2);
  const auto sqrt_bias2 = static_cast<float>(rule.sqrt_bias2);
  const auto eps = static_cast<float>(rule.eps);
  const auto step_size = static_cast<float>(rule.lr / rule.bias1);
  for (int64_t i = 0; i < range.n; ++i) {
    float w = load(range.master, i);
    float g = load(range.grad, range.grad_dtype, i) * grad_scale;
    if (rule.weight_decay != 0) {
      if (rule.decoupled) {
        w *= decay;
      } else {
        g = std::fma(weight_decay, w, g);
      }
    }
    const float m = lerp(load(range.state0, i), g, rest1);
    const float v = std::fma(rest2 * g, g, load(range.state1, i) * beta2);
    const float denominator = std::sqrt(v) / sqrt_bias2 + eps;
    w += (-step_size * m) / denominator;
    store(range.state0, i, m);
    store(range.state1, i, v);
    store_weight(range, i, w);
  }
}

void sgd(const SgdRule& rule, const UpdateRange& range, float grad_scale) {
  const auto lr = static_cast<float>(rule.lr);
  const auto weight_decay = static_cast<float>(rule.weight_decay);
  const auto momentum = static_cast<float>(rule.momentum);
  const auto undamped = static_cast<float>(1 - rule.dampening);
  for (int64_t i = 0; i < range.n; ++i) {
    const float w = load(range.master, i);
    float g = load(range.grad, range.grad_dtype, i) * grad_scale;
    if (rule.weight_decay != 0) g = std::fma(weight_decay, w, g);
    if (rule.momentum != 0) {
      const float buffer = rule.first_step ? g : std::fma(undamped, g, load(range.state0, i) * momentum);
      store(range.state0, i, buffer);
      g = rule.nesterov ? std::fma(momentum, buffer, g) : buffer;
    }
    store_weight(range, i, std::fma(-lr, g, w));
  }
}

float sign(float x) {
  return x > 0 ? 1.0f : (x < 0 ? -1.0f : 0.0f);
}

void lion(const LionRule& rule, const UpdateRange& range, float grad_scale) {
  const auto lr = static_cast<float>(rule.lr);
  const auto decay = static_cast<float>(1 - rule.lr * rule.weight_decay);
  const auto beta1 = static_cast<float>(rule.beta1), rest1 = static_cast<float>(1 - rule.beta1);
  const auto beta2 = static_cast<float>(rule.beta2), rest2 = static_cast<float>(1 - rule.beta2);
  for (int64_t i = 0; i < range.n; ++i) {
    const float g = load(range.grad, range.grad_dtype, i) * grad_scale;
    const float m = load(range.state0, i);
    const float w = load(range.master, i) * decay;
    store_weight(range, i, w - lr * sign(std::fma(rest1, g, m * beta1)));
    store(range.state0, i, std::fma(rest2, g, m * beta2));
  }
}

void adagrad(const AdagradRule& rule, const UpdateRange& range, float grad_scale) {
  const auto clr = static_cast<float>(rule.clr);
  const auto eps = static_cast<float>(rule.eps);
  const auto weight_decay = static_cast<float>(rule.weight_decay);
  for (int64_t i = 0; i < range.n; ++i) {
    const float w = load(range.master, i);
    float g = load(range.grad, range.grad_dtype, i) * grad_scale;
    if (rule.weight_decay != 0) g = std::fma(weight_decay, w, g);
    const float sum = std::fma(g, g, load(range.state0, i));
    store(range.state0, i, sum);
    store_weight(range, i, w + (-clr * g) / (std::sqrt(sum) + eps));
  }
}

void scaled_copy(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n) {
  if (scale == 1.0f && dst_dtype == src_dtype) {
    if (n > 0) std::memmove(dst, src, static_cast<size_t>(n) * size_of(dst_dtype));
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    store(dst, dst_dtype, i, load(src, src_dtype, i) * scale);
}

void scaled_add(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    store(dst, dst_dtype, i, std::fma(scale, load(src, src_dtype, i), load(dst, dst_dtype, i)));
  }
}

double sum_of_squares(const void* src, DType dtype, int64_t n) {
  double lane[16] = {};
  for (int64_t i = 0; i < n; ++i) {
    const double x = load(src, dtype, i);
    lane[i % 16] += x * x;  // the product of two floats is exact in double
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l)
      lane[l] += lane[l + half];
  }
  return lane[0];
}

}  // namespace

const Table& reference_table() {
  static constexpr Table table{"reference", adam, sgd, lion, adagrad, scaled_copy, scaled_add, sum_of_squares};
  return table;
}

}  // namespace tessera::kernels

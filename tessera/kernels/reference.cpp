// The plain scalar kernels: the truth that every vector version must match bit for bit, and the
// last resort.
#include "tessera/kernels/element.h"
#include "tessera/kernels/rules.h"
#include "tessera/kernels/table.h"

namespace tessera::kernels {
namespace {

template <class Element>
void update_all(const Element& rule, const UpdateRange& range, float grad_scale) {
  const StepKey key = step_key(range.random);
  for (int64_t i = 0; i < range.n; ++i)
    update_element(rule, range, grad_scale, key, i);
}

void adam(const AdamRule& rule, const UpdateRange& range, float grad_scale) {
  update_all(AdamElement(rule), range, grad_scale);
}
void sgd(const SgdRule& rule, const UpdateRange& range, float grad_scale) {
  if (rule.momentum == 0) return update_all(SgdElement(rule), range, grad_scale);
  update_all(MomentumElement(rule), range, grad_scale);
}
void lion(const LionRule& rule, const UpdateRange& range, float grad_scale) {
  update_all(LionElement(rule), range, grad_scale);
}
void adagrad(const AdagradRule& rule, const UpdateRange& range, float grad_scale) {
  update_all(AdagradElement(rule), range, grad_scale);
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

void scaled_copy_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                            const RandomKey& random) {
  const StepKey key = step_key(random);
  for (int64_t i = 0; i < n; ++i) {
    const float value = load(src, src_dtype, i) * scale;
    store_stochastic(dst, dst_dtype, i, value, random_bits(key, kGradient, random.first + i));
  }
}

void scaled_add_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                           const RandomKey& random) {
  const StepKey key = step_key(random);
  for (int64_t i = 0; i < n; ++i) {
    const float sum = std::fma(scale, load(src, src_dtype, i), load(dst, dst_dtype, i));
    store_stochastic(dst, dst_dtype, i, sum, random_bits(key, kGradient, random.first + i));
  }
}

void split(void* weight, void* residual, const float* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const SplitFloat halves = split_float(read<float>(src, i));
    write(weight, i, halves.weight);
    write(residual, i, halves.residual);
  }
}

void join(float* dst, const void* weight, const void* residual, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    write(dst, i, join_float({read<uint16_t>(weight, i), read<uint16_t>(residual, i)}));
}

double sum_of_squares(const void* src, DType dtype, int64_t n) {
  double lane[kSumLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    const double x = load(src, dtype, i);
    lane[i % kSumLanes] += x * x;  // the product of two floats is exact in double
  }
  for (int64_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l)
      lane[l] += lane[l + half];
  }
  return lane[0];
}

}  // namespace

const Table& reference_table() {
  static constexpr Table table{
      "reference",           adam,  sgd,  lion,          adagrad, scaled_copy, scaled_add, scaled_copy_stochastic,
      scaled_add_stochastic, split, join, sum_of_squares};
  return table;
}

}  // namespace tessera::kernels

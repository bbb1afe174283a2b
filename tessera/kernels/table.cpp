#include "tessera/kernels/table.h"

#include "tessera/kernels/elementwise.h"
#include "tessera/kernels/split.h"
#include "tessera/kernels/tables.h"

namespace tessera::kernels {

const std::vector<const Table*>& available_tables() {
  static const std::vector<const Table*> tables = [] {
    std::vector<const Table*> list{&reference_table()};
    append_vector_tables(list);
    return list;
  }();
  return tables;
}

const Table& best_table() {
  static const Table& table = *available_tables().back();
  return table;
}

void update(const AdamRule& rule, const UpdateRange& range, float grad_scale) {
  best_table().adam(rule, range, grad_scale);
}
void update(const SgdRule& rule, const UpdateRange& range, float grad_scale) {
  best_table().sgd(rule, range, grad_scale);
}
void update(const LionRule& rule, const UpdateRange& range, float grad_scale) {
  best_table().lion(rule, range, grad_scale);
}
void update(const AdagradRule& rule, const UpdateRange& range, float grad_scale) {
  best_table().adagrad(rule, range, grad_scale);
}

void scaled_copy(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n) {
  best_table().scaled_copy(dst, dst_dtype, src, src_dtype, scale, n);
}
void scaled_add(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n) {
  best_table().scaled_add(dst, dst_dtype, src, src_dtype, scale, n);
}
void scaled_copy_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                            const RandomKey& random) {
  best_table().scaled_copy_stochastic(dst, dst_dtype, src, src_dtype, scale, n, random);
}
void scaled_add_stochastic(void* dst, DType dst_dtype, const void* src, DType src_dtype, float scale, int64_t n,
                           const RandomKey& random) {
  best_table().scaled_add_stochastic(dst, dst_dtype, src, src_dtype, scale, n, random);
}
void split(void* weight_bf16, void* residual, const float* src, int64_t n) {
  best_table().split(weight_bf16, residual, src, n);
}
void join(float* dst, const void* weight_bf16, const void* residual, int64_t n) {
  best_table().join(dst, weight_bf16, residual, n);
}
double sum_of_squares(const void* src, DType dtype, int64_t n) {
  return best_table().sum_of_squares(src, dtype, n);
}

}  // namespace tessera::kernels

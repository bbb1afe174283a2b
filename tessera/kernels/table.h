// Run-time choice of instruction set. One source (table.inc.h) is compiled once per set; a Table
// holds its entry points. The reference table is plain scalar code, always present and last resort.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/kernels/types.h"
#include "tessera/kernels/update.h"

namespace tessera::kernels {

struct Table {
  const char* name;  // "reference", "avx2", "avx512"
  void (*adam)(const AdamRule&, const UpdateRange&, float grad_scale);
  void (*sgd)(const SgdRule&, const UpdateRange&, float grad_scale);
  void (*lion)(const LionRule&, const UpdateRange&, float grad_scale);
  void (*adagrad)(const AdagradRule&, const UpdateRange&, float grad_scale);
  void (*scaled_copy)(void*, DType, const void*, DType, float, int64_t);
  void (*scaled_add)(void*, DType, const void*, DType, float, int64_t);
  void (*scaled_copy_stochastic)(void*, DType, const void*, DType, float, int64_t, const RandomKey&);
  void (*scaled_add_stochastic)(void*, DType, const void*, DType, float, int64_t, const RandomKey&);
  void (*split)(void*, void*, const float*, int64_t);
  void (*join)(float*, const void*, const void*, int64_t);
  double (*sum_of_squares)(const void*, DType, int64_t);
};

const Table& reference_table();
// Tables that run on this processor, reference first, best last. Tests and benchmarks go through
// all of them.
const std::vector<const Table*>& available_tables();
// The table that the free functions of update.h, elementwise.h and split.h use.
const Table& best_table();

}  // namespace tessera::kernels

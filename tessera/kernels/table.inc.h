// The vector kernels, compiled once per instruction set by a table_<set>.cpp that includes its
// isa_<set>.h first.
//
// Such a file is compiled with flags that the processor may not have. An inline function or
// template with external linkage in it could be the copy that the linker keeps for the whole
// library, so everything here is in an unnamed namespace and nothing of the C++ standard library's
// templates is used.
#pragma once

#include "tessera/kernels/elementwise.inc.h"
#include "tessera/kernels/table.h"
#include "tessera/kernels/update.inc.h"

namespace tessera::kernels {
namespace {

constexpr Table vector_table(const char* name) {
  return {name,
          adam,
          sgd,
          lion,
          adagrad,
          scaled_copy_any,
          scaled_add_any,
          [](void* d, DType dt, const void* s, DType st, float f, int64_t n, const RandomKey& k) {
            reference_table().scaled_copy_stochastic(d, dt, s, st, f, n, k);
          },
          [](void* d, DType dt, const void* s, DType st, float f, int64_t n, const RandomKey& k) {
            reference_table().scaled_add_stochastic(d, dt, s, st, f, n, k);
          },
          [](void* w, void* r, const float* s, int64_t n) { reference_table().split(w, r, s, n); },
          [](float* d, const void* w, const void* r, int64_t n) { reference_table().join(d, w, r, n); },
          sum_of_squares_any};
}

}  // namespace
}  // namespace tessera::kernels

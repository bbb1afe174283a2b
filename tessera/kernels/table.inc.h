// The vector kernels, compiled once per instruction set by a table_<set>.cpp that includes its
// isa_<set>.h first.
//
// Such a file is compiled with flags that the processor may not have. An inline function or
// template with external linkage in it could be the copy that the linker keeps for the whole
// library, so everything here is in an unnamed namespace and nothing of the C++ standard library's
// templates is used.
#pragma once

#include "tessera/kernels/elementwise.inc.h"
#include "tessera/kernels/split.inc.h"
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
          scale_stochastic<false>,
          scale_stochastic<true>,
          split_any,
          join_any,
          sum_of_squares_any};
}

}  // namespace
}  // namespace tessera::kernels

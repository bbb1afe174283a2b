// Test support: torch's elementwise functions with the same bits in every call.
#pragma once

#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>

namespace tessera::testing {

// To be called before threads compute. MKL chooses its kernels in the first call of a process: where that came from two
// threads at once, 3 of 4000 processes had results of lower accuracy in it (tanh, sqrt), and none after such a call.
inline void choose_vector_kernels() {
  static const at::Tensor once = at::tanh(at::ones({64}));
}

}  // namespace tessera::testing

// Element types of the kernels. Kernels know pointers, counts and scalars: no tensors, no torch
// headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::kernels {

enum class DType : uint8_t { F32, BF16, F16 };

constexpr size_t size_of(DType dtype) {
  return dtype == DType::F32 ? 4 : 2;
}

}  // namespace tessera::kernels

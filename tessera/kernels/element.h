// One element of every pass: how it is loaded, rounded and stored. Shared by the reference and by CUDA.
#pragma once

#include <cmath>
#include <cstring>

#include "tessera/kernels/convert.h"
#include "tessera/kernels/random.h"
#include "tessera/kernels/update.h"

namespace tessera::kernels {

// Reads at any alignment on the host; on a device, where a memcpy of unknown alignment goes byte by byte, at T's.
template <class T>
TESSERA_ELEMENT T read(const void* p, int64_t i) {
#ifdef __CUDA_ARCH__
  return static_cast<const T*>(p)[i];
#else
  T value;
  memcpy(&value, static_cast<const char*>(p) + i * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
#endif
}
template <class T>
TESSERA_ELEMENT void write(void* p, int64_t i, T value) {
#ifdef __CUDA_ARCH__
  static_cast<T*>(p)[i] = value;
#else
  memcpy(static_cast<char*>(p) + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
#endif
}

// Convert a 16-bit element, of BF16 or F16, to fp32 and back: to nearest even, or by 16 random bits.
TESSERA_ELEMENT float from_half(uint16_t half, DType dtype) {
  return dtype == DType::BF16 ? float_from_bf16(half) : float_from_f16(half);
}
TESSERA_ELEMENT uint16_t to_half(float value, DType dtype) {
  return dtype == DType::BF16 ? bf16_from_float(value) : f16_from_float(value);
}
TESSERA_ELEMENT uint16_t to_half_stochastic(float value, DType dtype, uint32_t random) {
  return dtype == DType::BF16 ? bf16_stochastic(value, random) : f16_stochastic(value, random);
}

TESSERA_ELEMENT float load(const void* p, DType dtype, int64_t i) {
  return dtype == DType::F32 ? read<float>(p, i) : from_half(read<uint16_t>(p, i), dtype);
}

// Stores, rounded to nearest even.
TESSERA_ELEMENT void store(void* p, DType dtype, int64_t i, float value) {
  if (dtype == DType::F32) return write(p, i, value);
  write(p, i, to_half(value, dtype));
}

// Stores, rounded by 16 random bits; fp32 is stored as it is.
TESSERA_ELEMENT void store_stochastic(void* p, DType dtype, int64_t i, float value, uint32_t random) {
  if (dtype == DType::F32) return write(p, i, value);
  write(p, i, to_half_stochastic(value, dtype, random));
}

// The master, where an fp32 master has a 16-bit copy for compute that somebody may have written to.
TESSERA_ELEMENT float adopted(float master, uint16_t copy, DType dtype) {
  const float weight = from_half(copy, dtype);
  return from_half(to_half(master, dtype), dtype) == weight ? master : weight;
}

TESSERA_ELEMENT float load_master(const UpdateRange& range, int64_t i) {
  if (range.master != nullptr) {
    const float master = read<float>(range.master, i);
    return range.adopts ? adopted(master, read<uint16_t>(range.weight, i), range.weight_dtype) : master;
  }
  if (range.residual == nullptr) return load(range.weight, range.weight_dtype, i);
  return join_float({read<uint16_t>(range.weight, i), read<uint16_t>(range.residual, i)});
}

TESSERA_ELEMENT void store_master(const UpdateRange& range, int64_t i, float w, uint32_t random) {
  if (range.master != nullptr) {
    write(range.master, i, w);
    if (range.weight != nullptr) store(range.weight, range.weight_dtype, i, w);
  } else if (range.residual != nullptr) {
    const SplitFloat halves = split_float(w);
    write(range.weight, i, halves.weight);
    write(range.residual, i, halves.residual);
  } else if (range.rounding == Rounding::Stochastic) {
    store_stochastic(range.weight, range.weight_dtype, i, w, random);
  } else {
    store(range.weight, range.weight_dtype, i, w);
  }
}

TESSERA_ELEMENT void store_state(const UpdateRange& range, void* state, int64_t i, float value, uint32_t random) {
  if (range.rounding == Rounding::Stochastic) {
    store_stochastic(state, range.state_dtype, i, value, random);
  } else {
    store(state, range.state_dtype, i, value);
  }
}

// Updates element i; `key` is that of range.random (step_key).
template <class Element>
TESSERA_ELEMENT void update_element(const Element& rule, const UpdateRange& range, float grad_scale, StepKey key,
                                    int64_t i) {
  float w = load_master(range, i), s0 = 0, s1 = 0;
  if (Element::states > 0) s0 = load(range.state0, range.state_dtype, i);
  if (Element::states > 1) s1 = load(range.state1, range.state_dtype, i);
  rule.apply(w, load(range.grad, range.grad_dtype, i) * grad_scale, s0, s1);
  const uint64_t element = range.random.first + static_cast<uint64_t>(i);
  const bool draw = range.rounding == Rounding::Stochastic;
  if (Element::states > 0) store_state(range, range.state0, i, s0, draw ? random_bits(key, kState0, element) : 0);
  if (Element::states > 1) store_state(range, range.state1, i, s1, draw ? random_bits(key, kState1, element) : 0);
  store_master(range, i, w, draw ? random_bits(key, kWeight, element) : 0);
}

}  // namespace tessera::kernels

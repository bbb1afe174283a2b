// What a processor can do, beside __builtin_cpu_supports().
#pragma once

#include <cpuid.h>

namespace tessera {

// Conversions between fp16 and fp32: a name that clang 16 does not know.
inline bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace tessera

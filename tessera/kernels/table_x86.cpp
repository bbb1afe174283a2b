#include "tessera/base/cpu.h"
#include "tessera/kernels/tables.h"

namespace tessera::kernels {

// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
void append_vector_tables(std::vector<const Table*>& tables) {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
    tables.push_back(&avx2_table());
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    tables.push_back(&avx512_table());
  }
}

}  // namespace tessera::kernels

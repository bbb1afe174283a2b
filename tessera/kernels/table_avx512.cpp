#include "tessera/kernels/isa_avx512.h"
// The include of vectors comes first.
#include "tessera/kernels/table.inc.h"
#include "tessera/kernels/tables.h"

namespace tessera::kernels {

const Table& avx512_table() {
  static constexpr Table table = vector_table("avx512");
  return table;
}

}  // namespace tessera::kernels

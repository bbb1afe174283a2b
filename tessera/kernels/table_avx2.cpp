#include "tessera/kernels/isa_avx2.h"
// The include of vectors comes first.
#include "tessera/kernels/table.inc.h"
#include "tessera/kernels/tables.h"

namespace tessera::kernels {

const Table& avx2_table() {
  static constexpr Table table = vector_table("avx2");
  return table;
}

}  // namespace tessera::kernels

#include "tessera/kernels/tables.h"

namespace tessera::kernels {

void append_vector_tables(std::vector<const Table*>&) {}

}  // namespace tessera::kernels

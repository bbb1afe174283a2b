// The tables behind table.h; which of them are built depends on the target architecture.
#pragma once

#include "tessera/kernels/table.h"

namespace tessera::kernels {

const Table& avx2_table();    // AVX2, FMA and F16C
const Table& avx512_table();  // AVX-512 F, BW, VL, DQ

// Appends the vector tables that this processor and its operating system can run, best last.
// Defined by table_x86.cpp or table_portable.cpp.
void append_vector_tables(std::vector<const Table*>& tables);

}  // namespace tessera::kernels

// Runs entries of PTX programs on the host. Threads run one after the other, so entries may not wait for each other
// (no barriers, votes or shuffles); every load and store is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/kernels/ptx/ptx_program.h"

namespace tessera::kernels::ptx {

// Blocks of host memory that stand for a device's, with a gap around each that no kernel may touch.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  void* allocate(size_t bytes);
  bool release(void* block);  // false where this is no block
  bool holds(const void* at, size_t bytes) const;

 private:
  std::map<uintptr_t, size_t> blocks_;  // address, bytes
};

struct Grid {
  int64_t blocks, threads;
};

// `arguments` point at the parameters' values. std::runtime_error, naming the instruction, where a thread accesses what
// `memory` does not hold or an address that is not aligned to the access.
void run(const Program& program, const Entry& entry, Grid grid, const void* const* arguments, const Memory& memory);

}  // namespace tessera::kernels::ptx

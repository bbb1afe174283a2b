// Runs the tests; --blocks=N limits the grids of kernels to N blocks.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/kernels/ptx/ptx_runtime.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  constexpr char kBlocks[] = "--blocks=";
  for (int k = 1; k < argc; ++k) {
    if (std::strncmp(argv[k], kBlocks, std::strlen(kBlocks)) != 0) {
      std::fprintf(stderr, "usage: %s [--blocks=N] and options of GoogleTest\n", argv[0]);
      return EXIT_FAILURE;
    }
    tessera::kernels::ptx::limit_blocks(std::atoll(argv[k] + std::strlen(kBlocks)));
  }
  return RUN_ALL_TESTS();
}

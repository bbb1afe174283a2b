#include "tessera/base/heap.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

namespace tessera::testing {

namespace {

int64_t resident_bytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

}  // namespace

TEST(Heap, FreedPagesBetweenBlocksInUseGoBackToTheSystem) {
#if !defined(__GLIBC__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "malloc is not glibc's: another C library, or a sanitizer";
#endif
  constexpr size_t kBlock = 100'000;  // below the size from which malloc maps blocks of their own
  std::vector<void*> blocks;
  for (int i = 0; i < 600; ++i) {
    blocks.push_back(std::malloc(kBlock));
    std::memset(blocks.back(), 1, kBlock);
  }
  const int64_t full = resident_bytes();
  for (size_t i = 0; i < blocks.size(); i += 2)
    std::free(blocks[i]);
  heap::return_free_pages();
  EXPECT_LT(resident_bytes(), full - 25'000'000);
  for (size_t i = 1; i < blocks.size(); i += 2)
    std::free(blocks[i]);
}

// Under the address sanitizer, as with any other allocator in malloc's place, glibc's own is set up by the first call.
TEST(Heap, IsTrimmedBySeveralThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> waiting = 8;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      waiting -= 1;
      while (waiting > 0)
        std::this_thread::yield();
      heap::return_free_pages();
    });
  }
  for (std::thread& thread : threads)
    thread.join();
}

}  // namespace tessera::testing

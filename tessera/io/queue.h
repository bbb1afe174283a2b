// Queue: reads and writes of files, several of them in flight.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>

#include "tessera/io/file.h"

namespace tessera::io {

// Calls come from one thread. File and memory stay alive, and the memory untouched, until the transfer is over; get() of
// its future waits for it and throws its error.
class Queue {
 public:
  virtual ~Queue() = default;  // waits for transfers in flight

  virtual std::future<void> read(const File& file, void* to, int64_t bytes, int64_t offset) = 0;
  virtual std::future<void> write(const File& file, const void* from, int64_t bytes, int64_t offset) = 0;
};

// Makes a queue of `depth` transfers in flight, a thread for each; more wait for their turn. Threads, not io_uring, which took
// 0.88 to 1.10 times their time in a step with states on a disk (bench/reports/xeon/nvme-1.md) and needs a library.
std::unique_ptr<Queue> make_queue(int depth);

// Memory for transfers past the page cache (File::create).
struct AlignedFree {
  void operator()(char* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<char[], AlignedFree>;
AlignedBytes aligned_bytes(int64_t bytes);

}  // namespace tessera::io

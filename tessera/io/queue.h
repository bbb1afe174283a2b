// Queue: reads and writes of files, several of them in flight.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>

#include "tessera/io/file.h"

namespace tessera::io {

// Calls come from one thread. File and memory stay alive, and the memory untouched, until the transfer is over; get() of
// its future waits for it and throws its error.
class Queue {
 public:
  virtual ~Queue() = default;  // waits for what is in flight

  virtual std::future<void> read(const File& file, void* to, int64_t bytes, int64_t offset) = 0;
  virtual std::future<void> write(const File& file, const void* from, int64_t bytes, int64_t offset) = 0;
};

// `depth` transfers in flight; more wait for their turn.
std::unique_ptr<Queue> make_queue(int depth);

}  // namespace tessera::io

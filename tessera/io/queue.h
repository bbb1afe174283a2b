// Queue: reads and writes of files, several of them in flight. By io_uring, or by threads where that was not built or the
// kernel refuses it.
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
  virtual ~Queue() = default;  // waits for what is in flight

  virtual std::future<void> read(const File& file, void* to, int64_t bytes, int64_t offset) = 0;
  virtual std::future<void> write(const File& file, const void* from, int64_t bytes, int64_t offset) = 0;
};

enum class QueueKind { Threads, Uring };

// That of the environment variable TESSERA_IO; with "auto" or without it io_uring where it works. Value error for another
// word, or for io_uring where it does not work.
QueueKind chosen_queue();
// `depth` transfers in flight; more wait for their turn.
std::unique_ptr<Queue> make_queue(int depth, QueueKind kind = chosen_queue());

// ---- the kinds
std::unique_ptr<Queue> make_thread_queue(int depth);
std::unique_ptr<Queue> make_uring_queue(int depth);
// Empty when transfers by io_uring work here; else why they do not. Tries some.
inline constexpr auto kNotBuilt = "built without liburing";
std::string test_uring();

// Memory for transfers past the page cache (File::create).
struct AlignedFree {
  void operator()(char* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<char[], AlignedFree>;
AlignedBytes aligned_bytes(int64_t bytes);

}  // namespace tessera::io

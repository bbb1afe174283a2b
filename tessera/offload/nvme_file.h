// NvmeFile: the file on a disk in which the model states of one engine on one rank live, and the transfers on their way.
//
// Note [States on a disk]
//   The file has no name (io::File::scratch): no two runs can share it, and it is gone when its process is, whatever ended
//   that. Space is reserved before states live there, so a full disk is an error of the construction.
//   Transfers are of whole blocks of io::kDirectAlignment bytes and go past the page cache where the file system lets them:
//   what is in memory are the buffers of `staging()`, however large the states are. A range that begins or ends inside a
//   block takes the rest of the block from the disk first.
//   A transfer waits for those before it that overlap it, so every read gives what was written last; all others are on their
//   way at once.
#pragma once

#include <exception>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "tessera/io/file.h"
#include "tessera/io/queue.h"
#include "tessera/offload/staging.h"

namespace tessera::offload {

using QueueMaker = std::function<std::unique_ptr<io::Queue>(int depth)>;

// Bytes [begin, end) of the file.
struct Bytes {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// Calls from any number of threads. Errors are IoError and name file, operation and bytes; an error of a write is thrown by
// later writes, until flush() has thrown it.
class NvmeFile {
 public:
  // Makes `folder` and its parents where there is none, and the file in it; warns where the file system has no
  // transfers past the page cache. Up to `buffers` buffers of `buffer_bytes` bytes stay in memory, which `make_memory` gives.
  NvmeFile(const std::string& folder, int64_t buffers, int64_t buffer_bytes, const QueueMaker& make_queue,
           MemoryMaker make_memory = {});
  ~NvmeFile();

  void keep_buffers(int64_t count) { staging_->keep(count); }  // from now on, keeps at least so many

  // Reserves space for `bytes` bytes, which are zeros; begins at a block.
  Bytes reserve(int64_t bytes);

  // Memory that holds the bytes once `arrived` has been called; `arrived` throws what went wrong.
  struct Read {
    std::shared_ptr<char> memory;  // of the first byte
    std::function<void()> arrived;
  };
  // Reads `bytes` within `space`, which reserve() gave.
  Read read(Bytes bytes, Bytes space);
  // Memory for bytes that are to be written there; `bytes` as for write().
  std::shared_ptr<char> memory_for(Bytes bytes);
  // Writes `values`, which stay untouched; `keeps` are kept alive until they are there. Copies nothing where they lie in memory
  // of read() or memory_for(), from the same block on to the end of a block or of `space`.
  void write(Bytes bytes, Bytes space, const char* values, std::shared_ptr<void> keeps);
  // Returns when what was written is in the file. Throws the first of several errors, and leaves none for later.
  void flush();

  int64_t peak_buffer_bytes() const { return staging_->peak_bytes(); }

 private:
  struct Transfer {
    Bytes bytes;
    std::shared_ptr<void> keeps;
    std::shared_future<void> done;
    bool writes;
  };
  static Bytes whole_blocks(Bytes bytes);
  std::shared_ptr<char> take(int64_t bytes);
  void settle(Bytes bytes, bool reads_too);
  void check_writes() const;
  std::list<Transfer>::iterator finish(std::list<Transfer>::iterator transfer);
  void read_now(char* to, Bytes bytes);

  std::mutex mutex_;
  io::File file_;
  int64_t end_ = 0;  // of what is reserved
  std::shared_ptr<Staging> staging_;
  std::list<Transfer> flight_;
  std::exception_ptr failure_;        // of the first write that failed since the last flush()
  std::unique_ptr<io::Queue> queue_;  // first to go: it waits for what is in flight
};

}  // namespace tessera::offload

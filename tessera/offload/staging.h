// Staging: aligned memory that values pass through on their way between a file and who works on them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/io/queue.h"

namespace tessera::offload {

// Makes so many bytes at a multiple of io::kDirectAlignment.
using MemoryMaker = std::function<std::shared_ptr<char>(int64_t bytes)>;

// Calls from any number of threads: memory of take() is let go of wherever its last tensor dies.
class Staging : public std::enable_shared_from_this<Staging> {
 public:
  // Keeps up to `count` buffers of `bytes` bytes each, made when they are first needed. `make`: page-locked memory,
  // as copies to a device want; empty: ordinary memory.
  Staging(int64_t count, int64_t bytes, MemoryMaker make = {});
  void keep(int64_t count);  // from now on, keeps at least so many

  // Takes at least `bytes` bytes at a multiple of io::kDirectAlignment: a kept buffer if one is free and large enough; else new
  // memory, which is freed when it is let go of.
  std::shared_ptr<char> take(int64_t bytes);
  // Whether take(bytes) gives a kept buffer, or memory for which none is large enough.
  bool has_room(int64_t bytes) const;
  // Whether the `bytes` bytes from `memory` on lie in what one take() gave.
  bool holds(const char* memory, int64_t bytes) const;
  int64_t peak_bytes() const;  // the most bytes there ever were

 private:
  struct Block {
    std::shared_ptr<char> memory;
    int64_t bytes;
    bool kept;
  };
  Block free_or_new(int64_t bytes);
  void return_buffer(char* memory);

  const int64_t bytes_;
  const MemoryMaker make_;
  mutable std::mutex mutex_;
  std::vector<Block> free_;
  std::map<const char*, Block> taken_;
  int64_t count_ = 0;
  int64_t kept_ = 0;  // buffers that are free or taken
  int64_t now_bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace tessera::offload

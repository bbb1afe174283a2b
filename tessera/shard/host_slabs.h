// HostSlabs: page-locked host memory of one engine. torch's allocator rounds up to the next power of two, which is half as much
// again for a buffer of each unit; so it is asked for powers of two, which are divided here.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

namespace tessera::shard {

// Any number of threads. Pieces are not given back one by one: all memory goes to torch's allocator, which waits for copies
// that still use it, once neither this nor a piece of the same slab is left.
class HostSlabs {
 public:
  // So many bytes will be taken from here on, besides those of take_pieces().
  void expect(int64_t bytes);
  // `bytes` zeros in a row, at a multiple of kAlignment.
  at::Tensor take(int64_t bytes);
  // `bytes` zeros in pieces of which each but the last is a multiple of `step` bytes, a power of two: next to nothing is lost.
  std::vector<at::Tensor> take_pieces(int64_t bytes, int64_t step);
  static constexpr int64_t kAlignment = 4096;

 private:
  struct Slab {
    at::Tensor memory;
    int64_t used;
  };

  std::mutex mutex_;
  std::vector<Slab> slabs_;
  int64_t expected_ = 0, taken_ = 0;
};
using HostSlabsPtr = std::shared_ptr<HostSlabs>;

// Gives the system what torch's allocator of page-locked memory for devices of the type keeps for later. Throws nothing.
void return_host_memory(c10::DeviceType type) noexcept;

}  // namespace tessera::shard

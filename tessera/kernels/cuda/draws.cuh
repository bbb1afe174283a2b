// The random bits of an eight: Note [Random bits] in kernels/random.h.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "tessera/kernels/random.h"

namespace tessera::kernels::cuda {

// Numbers of a range's elements in the whole flat space: `run` from `first` on, then as many `stride` further on, and so
// on. One run, mostly; the parts that tensor parallelism cuts out of the rows of a matrix have many.
struct Numbers {
  uint64_t first;
  int run, stride;

  static Numbers one_run(uint64_t first) { return {first, std::numeric_limits<int>::max(), 0}; }

  // The number of element i, and how many elements at least are in its run from there on. Elements before 0 are not there.
  struct Number {
    uint64_t number;
    int left;
  };
  __device__ Number of(int i) const {
    if (i < run) return {first + static_cast<uint64_t>(int64_t{i}), run - std::max(i, 0)};
    const int number = i / run, within = i % run;
    return {first + static_cast<uint64_t>(int64_t{number} * stride + within), run - within};
  }
};

// 16 bits for each of eight elements, in each of the streams from `first_stream` to `last_stream`. A word has the bits of
// four numbers, so two words serve where an eight begins at one and its numbers are one run.
template <Stream first_stream, Stream last_stream>
class Draws {
 public:
  __device__ Draws(StepKey key, const Numbers& numbers, int begin) {
    const auto [number, left] = numbers.of(begin);
    if (number % 4 == 0 && left >= 8) {
      set(0, root_of(key, number / 4), 0, 0);
      set(1, root_of(key, (number + 4) / 4), 0, 0);
    } else {
      gather(0, key, numbers, begin);
      gather(1, key, numbers, begin + 4);
    }
  }

  __device__ uint32_t of(Stream stream, int k) const {
    return 0xffffu - (static_cast<uint32_t>(word_[stream - first_stream][k / 4] >> (16 * (k % 4))) & 0xffffu);
  }

 private:
  // Gives elements k and up of a half the bits of a word from `at` on.
  __device__ void set(int half, Root root, int at, int k) {
#pragma unroll
    for (int s = first_stream; s <= last_stream; ++s) {
      uint64_t& word = word_[s - first_stream][half];
      const uint64_t found = stream_word(root, static_cast<Stream>(s)) >> (16 * at);
      word = k == 0 ? found : (word & ~(~uint64_t{0} << (16 * k))) | found << (16 * k);
    }
  }
  // Gathers four elements from `begin` on, out of as many words as they lie in.
  __device__ void gather(int half, StepKey key, const Numbers& numbers, int begin) {
#pragma unroll 1
    for (int k = 0; k < 4;) {
      const auto [number, left] = numbers.of(begin + k);
      const int at = static_cast<int>(number % 4);
      set(half, root_of(key, number / 4), at, k);
      k += left < 4 - at ? left : 4 - at;
    }
  }

  uint64_t word_[last_stream - first_stream + 1][2];
};

}  // namespace tessera::kernels::cuda

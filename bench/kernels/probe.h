// What memory gives: streams of the kernels' sizes with an integer addition each, nothing else.
#pragma once

#include <cstdint>

namespace tessera::bench {

struct Streams {
  uint32_t* update32[3] = {};  // 4-byte elements, read and written
  const uint32_t* read32[5] = {};
  const uint16_t* read16[5] = {};
  uint16_t* update16 = nullptr;
  uint32_t* write32 = nullptr;
  uint16_t* write16 = nullptr;
};

// Touches elements [begin, end) of each stream that is there. `ahead`: elements of software
// prefetch, 0 for none.
void probe(const Streams& streams, int64_t begin, int64_t end, int64_t ahead);

}  // namespace tessera::bench

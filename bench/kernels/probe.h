// What memory gives: streams of the kernels' sizes with an addition each, nothing else.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::bench {

// Streams of 4-byte and 2-byte elements. A probe leaves the data as it is.
struct Streams {
  std::vector<char*> update4, update2;  // read and written
  std::vector<char*> read4, read2;
  std::vector<char*> write4, write2;

  // Of memory, an element.
  int64_t width() const {
    return static_cast<int64_t>(4 * (update4.size() + read4.size() + write4.size()) +
                                2 * (update2.size() + read2.size() + write2.size()));
  }
  // Moved per element.
  int64_t bytes() const {
    return static_cast<int64_t>(8 * update4.size() + 4 * update2.size() + 4 * read4.size() + 2 * read2.size() +
                                4 * write4.size() + 2 * write2.size());
  }
};

// Touches elements [begin, end) of every stream; begin is a multiple of 32. `in_flight`: bytes of all streams together
// between prefetch and use, 0 for no prefetch. Throws std::invalid_argument for a combination that no kernel has.
void probe(const Streams& streams, int64_t begin, int64_t end, int64_t in_flight);

}  // namespace tessera::bench

// Copies of bytes on the host.
//
// Note [Past the caches]
//   A store to a line that is in no cache reads that line first, and pushes another one out. Into a result that is larger
//   than the caches a copy goes faster past them, where the processor can do that (x86), and leaves them to the rings that
//   carry the data. memcpy does so too, but from a size on that follows from the last cache of the whole processor, and
//   the pieces of a result that arrive one by one never reach it.
//   What goes into a ring comes from memory then, and the ring's lines are in the cache of the core that has read them
//   last. Both are asked for ahead of the copy.
#pragma once

#include <cstdint>

namespace tessera::comm {

inline constexpr int64_t kLine = 64;  // bytes of a cache line

// Copy at any alignment. The ranges do not overlap, or are the same: then nothing happens.
void copy_bytes(char* to, const char* from, int64_t bytes);
void copy_past_caches(char* to, const char* from, int64_t bytes);
void copy_ahead(char* to, const char* from, int64_t bytes);  // prefetches both sides; the ranges do not overlap

// Copies into a ring, from a tensor of `total` bytes that is not in the caches for another reason.
void copy_to_ring(char* to, const char* from, int64_t bytes, int64_t total);

// Copies to a part of a result of `total` bytes; nothing else is written there afterwards.
void copy_result(char* to, const char* from, int64_t bytes, int64_t total);

}  // namespace tessera::comm

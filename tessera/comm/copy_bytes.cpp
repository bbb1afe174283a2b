#include "tessera/comm/copy_bytes.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tessera::comm {
namespace {

constexpr int64_t kLarge = 8 << 20;  // bytes: more than a core's share of the caches

#if defined(__SSE2__)
template <class Store>
void copy_line(char* to, const char* from, const Store& store) {
  auto* const words = reinterpret_cast<__m128i*>(to);
  const auto* const source = reinterpret_cast<const __m128i*>(from);
  for (int word = 0; word < 4; ++word)
    store(words + word, _mm_loadu_si128(source + word));
}
#endif

}  // namespace

void copy_bytes(char* to, const char* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

#if defined(__SSE2__)
void copy_ahead(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kRead = 4096, kWrite = 1024;  // chosen with transport_bench
  const int64_t whole = bytes / kLine * kLine;
  for (int64_t i = 0; i < whole; i += kLine) {
    _mm_prefetch(from + i + kRead, _MM_HINT_T0);
    _mm_prefetch(to + i + kWrite, _MM_HINT_T0);
    copy_line(to + i, from + i, [](__m128i* word, __m128i value) { _mm_storeu_si128(word, value); });
  }
  copy_bytes(to + whole, from + whole, bytes - whole);
}

void copy_past_caches(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kAhead = 2048;  // the processor's own prefetching ends with each page
  if (to == from) return;
  const auto over = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
  const int64_t head = std::min(bytes, (kLine - over) % kLine);
  const int64_t whole = (bytes - head) / kLine * kLine;
  copy_bytes(to, from, head);
  for (int64_t i = head; i < head + whole; i += kLine) {
    _mm_prefetch(from + i + kAhead, _MM_HINT_T0);
    copy_line(to + i, from + i, [](__m128i* word, __m128i value) { _mm_stream_si128(word, value); });
  }
  copy_bytes(to + head + whole, from + head + whole, bytes - head - whole);
  _mm_sfence();  // such stores have no order among others: whoever learns of the bytes next shall see them
}
#else
void copy_ahead(char* to, const char* from, int64_t bytes) {
  copy_bytes(to, from, bytes);
}
void copy_past_caches(char* to, const char* from, int64_t bytes) {
  copy_bytes(to, from, bytes);
}
#endif

void copy_to_ring(char* to, const char* from, int64_t bytes, int64_t total) {
  if (total < kLarge) {
    copy_bytes(to, from, bytes);
  } else {
    copy_ahead(to, from, bytes);
  }
}

void copy_result(char* to, const char* from, int64_t bytes, int64_t total) {
  if (total < kLarge) {
    copy_bytes(to, from, bytes);
  } else {
    copy_past_caches(to, from, bytes);
  }
}

}  // namespace tessera::comm

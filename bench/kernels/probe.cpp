#include "bench/kernels/probe.h"

namespace tessera::bench {
namespace {

constexpr int64_t kChunk = 32;

template <class T>
void fetch(const T* p, int64_t i) {
  const auto address = reinterpret_cast<uintptr_t>(p + i);
  for (uintptr_t line = 0; line < kChunk * sizeof(T); line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + line));
  }
}

}  // namespace

void probe(const Streams& s, int64_t begin, int64_t end, int64_t ahead) {
  uint32_t seen[kChunk] = {};
  for (int64_t i = begin; i + kChunk <= end; i += kChunk) {
    if (ahead != 0) {
      for (auto* p : s.update32)
        if (p) fetch(p, i + ahead);
      for (auto* p : s.read32)
        if (p) fetch(p, i + ahead);
      for (auto* p : s.read16)
        if (p) fetch(p, i + ahead);
      if (s.update16) fetch(s.update16, i + ahead);
      if (s.write32) fetch(s.write32, i + ahead);
      if (s.write16) fetch(s.write16, i + ahead);
    }
    uint32_t value[kChunk];
    for (int k = 0; k < kChunk; ++k)
      value[k] = seen[k];
    for (auto* p : s.read32) {
      if (p == nullptr) continue;
      for (int k = 0; k < kChunk; ++k)
        value[k] += p[i + k];
    }
    for (auto* p : s.read16) {
      if (p == nullptr) continue;
      for (int k = 0; k < kChunk; ++k)
        value[k] += p[i + k];
    }
    for (auto* p : s.update32) {
      if (p == nullptr) continue;
      for (int k = 0; k < kChunk; ++k)
        p[i + k] += value[k] & 1;
    }
    if (s.update16) {
      for (int k = 0; k < kChunk; ++k)
        s.update16[i + k] += static_cast<uint16_t>(value[k] & 1);
    }
    if (s.write32) {
      for (int k = 0; k < kChunk; ++k)
        s.write32[i + k] = value[k];
    }
    if (s.write16) {
      for (int k = 0; k < kChunk; ++k)
        s.write16[i + k] = static_cast<uint16_t>(value[k]);
    }
    for (int k = 0; k < kChunk; ++k)
      seen[k] ^= value[k];
  }
  volatile uint32_t sink = seen[0];
  (void)sink;
}

}  // namespace tessera::bench

// Plays the scripts of op.h without memory that is shared.
#pragma once

#include <functional>

#include "tessera/comm/shm/op.h"
#include "tests/comm/collectives.h"

namespace tessera::testing {

using comm::kRecordBytes;
using comm::ShmOp;
using comm::ShmOpPtr;

// Plays the script of one call on all ranks. Writers go first wherever they are ready, then a rank drawn by chance reads.
inline std::string play(const std::vector<ShmOpPtr>& ops, uint64_t seed) {
  const int size = static_cast<int>(ops.size());
  std::vector<std::vector<std::vector<char>>> records(size);  // [rank][step]
  std::mt19937_64 random(seed);
  while (true) {
    bool all_done = true;
    for (int r = 0; r < size; ++r) {
      ShmOp& op = *ops[r];
      while (op.written < op.steps().value_or(op.steps_at_least()) && op.ready(op.written, op.received)) {
        records[r].emplace_back(kRecordBytes, '\x7f');
        op.write(op.written++, records[r].back().data());
      }
      all_done = all_done && op.steps() && op.received == *op.steps();
    }
    if (all_done) return {};
    bool moved = false;
    const int start = static_cast<int>(random() % size);
    for (int i = 0; i < size && !moved; ++i) {
      const int r = (start + i) % size;
      ShmOp& op = *ops[r];
      if (op.received >= op.written) continue;
      std::vector<const char*> from(size, nullptr);
      bool there = true;
      for (int p = 0; p < size; ++p) {
        if (p == r) continue;
        there = there && static_cast<int64_t>(records[p].size()) > op.received;
        if (there) from[p] = records[p][op.received].data();
      }
      if (!there) continue;
      if (auto text = op.read(op.received, from.data()); !text.empty()) return text;
      op.received += 1;
      moved = true;
    }
    if (!moved) return "nothing moves";
  }
}

inline const std::vector<int64_t> kSizes = {0, 1, 5, 1000, 65536, 65537, 200003};

inline void over_sizes(const std::function<void(int, int64_t)>& body) {
  for (const int size : {2, 3, 5}) {
    for (const int64_t n : kSizes)
      body(size, n);
  }
  body(2, (4 << 20) + 5);  // results that are written past the caches
}

}  // namespace tessera::testing

// Threads of ATen's pool (the process has exactly one OpenMP runtime: torch's).
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

namespace tessera {

// Calls f(begin, end) over disjoint ranges that cover [0, n); ranges start at multiples of `align`. Runs serially
// below `grain` elements, inside another parallel region, or with one thread.
template <class F>
void parallel_ranges(int64_t n, int64_t grain, int64_t align, const F& f) {
  if (n <= grain) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
  const int64_t blocks = (n + align - 1) / align;
  at::parallel_for(0, blocks, std::max<int64_t>(1, grain / align),
                   [&](int64_t begin, int64_t end) { f(begin * align, std::min(n, end * align)); });
}

}  // namespace tessera

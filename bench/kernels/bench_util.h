// Buffers and threads shared by the kernel benchmarks.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "tessera/base/parallel.h"
#include "tessera/kernels/table.h"

namespace tessera::bench {

constexpr int64_t kElements = 10'000'000;

inline const char* name_of(kernels::DType dtype) {
  return dtype == kernels::DType::F32 ? "f32" : dtype == kernels::DType::BF16 ? "bf16" : "f16";
}

// Page-aligned, touched, filled with a small positive value of the type.
class Block {
 public:
  Block(kernels::DType dtype, int64_t n)
      : bytes_(static_cast<char*>(std::aligned_alloc(4096, (n * kernels::size_of(dtype) + 8191) / 4096 * 4096))) {
    const float value = 0.01f;
    for (int64_t i = 0; i < n; ++i) {
      if (dtype == kernels::DType::F32) std::memcpy(bytes_.get() + 4 * i, &value, 4);
    }
    if (dtype != kernels::DType::F32) std::memset(bytes_.get(), 0x2c, 2 * n);
  }
  template <class T = void>
  T* as(int64_t byte_offset = 0) const {
    return reinterpret_cast<T*>(bytes_.get() + byte_offset);
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> bytes_;
};

// Runs f(begin, end) over all elements on `threads` threads, once per iteration, and reports bytes
// per second.
template <class F>
void measure(benchmark::State& state, int threads, int64_t bytes_per_element, const F& f) {
  at::set_num_threads(threads);
  for (auto _ : state) {
    parallel_ranges(kElements, 32768, 64, f);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kElements * bytes_per_element);
}

}  // namespace tessera::bench

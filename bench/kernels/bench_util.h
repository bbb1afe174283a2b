// Buffers, threads and timing shared by the kernel benchmarks.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/kernels/probe.h"
#include "tessera/base/parallel.h"
#include "tessera/kernels/table.h"

namespace tessera::bench {

// What the command line chooses beside Google Benchmark's own flags.
struct Settings {
  int64_t elements = 10'000'000;
  bool best_only = false;  // the table that the library would choose, alone
};

void add_updates(const Settings& settings);
void add_elementwise(const Settings& settings);

inline const char* name_of(kernels::DType dtype) {
  return dtype == kernels::DType::F32 ? "f32" : dtype == kernels::DType::BF16 ? "bf16" : "f16";
}

// Of a buffer: windows of the elements that are measured, so many that a stream of 2 bytes passes 200 MB before it comes
// back to one, which caches of 32 MiB have lost by then. Kernels work on the first.
struct Capacity {
  explicit Capacity(int64_t elements)
      : window((elements + 31) / 32 * 32), windows(std::max<int64_t>(1, 100'000'000 / window)) {}

  int64_t window, windows;  // elements of one, and how many
  int64_t elements() const { return window * windows; }
};

// Page-aligned and touched.
class Block {
 public:
  Block(kernels::DType dtype, int64_t n)
      : bytes_(static_cast<char*>(std::aligned_alloc(4096, (n * kernels::size_of(dtype) + 8191) / 4096 * 4096))) {
    std::memset(bytes_.get(), 0, static_cast<size_t>(n * kernels::size_of(dtype)));
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

// All but the reference, which is there to be right; it alone where nothing else runs.
inline std::vector<const kernels::Table*> measured_tables(const Settings& settings) {
  if (settings.best_only) return {&kernels::best_table()};
  auto list = kernels::available_tables();
  if (list.size() > 1) list.erase(list.begin());
  return list;
}

// Standard normal.
inline std::vector<float> normal_values() {
  std::vector<float> values(1 << 16);
  std::mt19937 bits(1);
  std::normal_distribution<float> normal;
  for (float& value : values)
    value = normal(bits);
  return values;
}

// values * scale, again and again, as n elements of a type.
inline void fill(const Block& block, kernels::DType dtype, int64_t n, const std::vector<float>& values, float scale) {
  const auto period = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < n; i += period)
    kernels::best_table().scaled_copy(block.as(i * static_cast<int64_t>(kernels::size_of(dtype))), dtype, values.data(),
                                      kernels::DType::F32, scale, std::min(period, n - i));
}

inline double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Of one f(begin, end) over all elements, on the threads that are set.
template <class F>
double pass_seconds(int64_t elements, const F& f) {
  return seconds_of([&] {
    parallel_ranges(elements, 32768, 64, f);
    benchmark::ClobberMemory();
  });
}

inline double picoseconds_an_element(const std::vector<double>& seconds, int64_t elements) {
  return median(seconds) / static_cast<double>(elements) * 1e12;
}

constexpr int64_t kInFlight = 8192;  // bytes between prefetch and use, as the kernels have it (vec.inc.h)

// A probe with and without prefetch, timed in turns with a kernel. Each pass takes the next of the first `windows` windows.
class ProbeTimes {
 public:
  ProbeTimes(const Streams& streams, int64_t elements, int64_t windows)
      : streams_(streams), elements_(elements), windows_(windows) {}

  void take() {
    for (Way& way : ways_) {
      const int64_t first = next_++ % windows_ * Capacity(elements_).window;
      way.seconds.push_back(pass_seconds(
          elements_, [&](int64_t begin, int64_t end) { probe(streams_, first + begin, first + end, way.in_flight); }));
    }
  }

  // The time of the better way as a share of the kernel's: the median of the turns' own shares, because what neighbours
  // leave of the memory may change between one turn and the next.
  double percent_of(const std::vector<double>& kernel) const {
    const bool first = median(ways_[0].seconds) < median(ways_[1].seconds);
    std::vector<double> shares = ways_[first ? 0 : 1].seconds;
    for (size_t i = 0; i < shares.size(); ++i)
      shares[i] /= kernel[i];
    return 100 * median(shares);
  }

 private:
  struct Way {
    int64_t in_flight;
    std::vector<double> seconds;
  };
  const Streams& streams_;
  int64_t elements_, windows_, next_ = 0;
  Way ways_[2] = {{0, {}}, {kInFlight, {}}};
};

// Times f(begin, end) over `elements` elements on `threads` threads, in turns with probes of the same streams, so that a busy
// neighbour slows both. One probe takes the same elements, maybe out of the cache as f does; the other takes windows that
// only memory has by then, and a pass of f that is not timed follows it, for what f leaves in the cache. Reports bytes and
// picoseconds an element (median), and f's shares of what the probes reach.
template <class F>
void measure(benchmark::State& state, int64_t elements, int threads, const Streams& streams, const F& f) {
  at::set_num_threads(threads);
  const int64_t windows = Capacity(elements).windows;
  std::vector<double> times;
  ProbeTimes same(streams, elements, 1), memory(streams, elements, windows);
  for (auto _ : state) {
    if (windows > 1) {
      memory.take();
      pass_seconds(elements, f);
    }
    times.push_back(pass_seconds(elements, f));
    state.SetIterationTime(times.back());
    same.take();
  }
  state.SetBytesProcessed(state.iterations() * elements * streams.bytes());
  state.counters["bytes_per_element"] = static_cast<double>(streams.bytes());
  state.counters["ps_per_element"] = picoseconds_an_element(times, elements);
  state.counters["%_of_probe"] = same.percent_of(times);
  state.counters["%_of_memory"] = (windows > 1 ? memory : same).percent_of(times);
}

}  // namespace tessera::bench

// kernels_bench [--elements=N] [--best_only] [flags of Google Benchmark]
#include <cstdlib>
#include <iostream>

#include "bench/kernels/bench_util.h"

namespace {

constexpr int64_t kLeast = 1 << 16;

// Whether `argument` is one of our own; exits on a number that is none.
bool read_own(const std::string& argument, tessera::bench::Settings& settings) {
  const std::string elements = "--elements=";
  if (argument == "--best_only") {
    settings.best_only = true;
    return true;
  }
  if (argument.rfind(elements, 0) != 0) return false;
  char* end = nullptr;
  settings.elements = std::strtoll(argument.c_str() + elements.size(), &end, 10);
  if (*end != 0 || settings.elements < kLeast) {
    std::cerr << argument << ": a number, " << kLeast << " at least\n";
    std::exit(2);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  tessera::bench::Settings settings;
  for (int i = 1; i < argc; ++i) {
    if (read_own(argv[i], settings)) continue;
    std::cerr << "unknown argument " << argv[i] << "\n";
    return 2;
  }
  tessera::bench::add_updates(settings);
  tessera::bench::add_elementwise(settings);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}

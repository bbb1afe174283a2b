#include "tessera/io/progress.h"

#include <cstdio>

namespace tessera::io {

Progress::Progress(std::string what, int64_t bytes, std::function<void(const std::string&)> say,
                   std::chrono::milliseconds every)
    : what_(std::move(what)),
      bytes_(bytes),
      say_(say ? std::move(say)
               : [](const std::string& line) { std::fprintf(stderr, "[tessera] %s\n", line.c_str()); }),
      every_(every),
      next_(Clock::duration(every).count()) {}

void Progress::add(int64_t bytes) {
  const int64_t done = done_ += bytes;
  const Clock::rep passed = (Clock::now() - start_).count();
  Clock::rep due = next_;
  // One of the threads that see that a line is due says it.
  if (passed < due || !next_.compare_exchange_strong(due, passed + Clock::duration(every_).count())) return;
  constexpr double kGiga = 1e9;
  const double seconds = std::chrono::duration<double>(Clock::duration(passed)).count();
  char numbers[128];
  std::snprintf(numbers, sizeof(numbers), ": %.1f of %.1f GB, %.2f GB/s", static_cast<double>(done) / kGiga,
                static_cast<double>(bytes_) / kGiga, static_cast<double>(done) / kGiga / seconds);
  say_(what_ + numbers);
}

}  // namespace tessera::io

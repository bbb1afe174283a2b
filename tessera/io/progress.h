// Progress: how far a long transfer of bytes has come, a line now and then. Nothing for short ones.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace tessera::io {

class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  // `say` gets lines such as "saving 'run': 1.2 of 4.5 GB, 0.61 GB/s"; default: they go to stderr.
  Progress(std::string what, int64_t bytes, std::function<void(const std::string&)> say = nullptr,
           std::chrono::milliseconds every = std::chrono::seconds(10));

  // So many more bytes are done. By any thread.
  void add(int64_t bytes);

 private:
  const std::string what_;
  const int64_t bytes_;
  const std::function<void(const std::string&)> say_;
  const std::chrono::milliseconds every_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<int64_t> done_{0};
  std::atomic<Clock::rep> next_;  // when the next line is due, since start_
};

}  // namespace tessera::io

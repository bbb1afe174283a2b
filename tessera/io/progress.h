// How far something long has come. Progress: a transfer of bytes, a line now and then, nothing for short ones. ProgressLine: a run, in
// one line of the terminal, or a line now and then.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace tessera::io {

class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  // `say` gets lines such as "saving 'run': 1.2 of 4.5 GB, 0.61 GB/s"; default: they go to stderr.
  Progress(std::string what, int64_t bytes, std::function<void(const std::string&)> say = nullptr,
           std::chrono::milliseconds every = std::chrono::seconds(10));

  // Says that so many more bytes are done. By any thread.
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

// Whether standard error is a terminal.
bool shows_in_place();

// Lines of a run. In place: the line is written over the one before, at most once in `every`, and cut where the terminal ends.
// Elsewhere each line is a new one. For one thread.
class ProgressLine {
 public:
  using Clock = std::chrono::steady_clock;
  // `write` gets what goes to standard error by default.
  explicit ProgressLine(bool in_place = shows_in_place(), std::function<void(const std::string&)> write = nullptr,
                        std::chrono::milliseconds every = std::chrono::milliseconds(100));
  ~ProgressLine();  // ends the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  bool in_place() const { return in_place_; }
  void set_in_place(bool in_place) { in_place_ = in_place; }
  // Whether a text would be shown now. `due`: whether it would where each is a line.
  bool wants(bool due) const;
  void show(const std::string& text);
  // Writes a line that stays, before the line in place.
  void say(const std::string& line);
  // Makes the line in place stay.
  void end();

 private:
  bool in_place_;
  const std::function<void(const std::string&)> write_;
  const std::chrono::milliseconds every_;
  std::optional<Clock::time_point> shown_;
  bool open_ = false;
};

}  // namespace tessera::io

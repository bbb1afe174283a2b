#include "tessera/io/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

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
  // One of the threads that see that a line is due writes it.
  if (passed < due || !next_.compare_exchange_strong(due, passed + Clock::duration(every_).count())) return;
  constexpr double kGiga = 1e9;
  const double seconds = std::chrono::duration<double>(Clock::duration(passed)).count();
  char numbers[128];
  std::snprintf(numbers, sizeof(numbers), ": %.1f of %.1f GB, %.2f GB/s", static_cast<double>(done) / kGiga,
                static_cast<double>(bytes_) / kGiga, static_cast<double>(done) / kGiga / seconds);
  say_(what_ + numbers);
}

namespace {

// Columns of the terminal; 80 where the terminal does not say.
size_t terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
}

}  // namespace

bool shows_in_place() {
  return isatty(STDERR_FILENO) == 1;
}

ProgressLine::ProgressLine(bool in_place, std::function<void(const std::string&)> write,
                           std::chrono::milliseconds every)
    : in_place_(in_place),
      write_(write ? std::move(write)
                   : [](const std::string& text) { std::fwrite(text.data(), 1, text.size(), stderr); }),
      every_(every) {}

ProgressLine::~ProgressLine() {
  end();
}

bool ProgressLine::wants(bool due) const {
  return in_place_ ? !shown_ || Clock::now() - *shown_ >= every_ : due;
}

void ProgressLine::show(const std::string& text) {
  if (!in_place_) return say(text);
  shown_ = Clock::now();
  open_ = true;
  write_("\r\x1b[K" + text.substr(0, terminal_width() - 1));
}

void ProgressLine::say(const std::string& line) {
  end();
  write_(line + "\n");
}

void ProgressLine::end() {
  if (std::exchange(open_, false)) write_("\n");
}

}  // namespace tessera::io

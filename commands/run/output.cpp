#include "commands/run/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace tessera::run {
namespace {

constexpr size_t kBlock = 1 << 16, kLongest = 1 << 20;  // a longer line is passed on in pieces

}  // namespace

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

Output::Output(int from, int to, std::string prefix, const std::string& copy)
    : from_(from), to_(to), prefix_(std::move(prefix)), copy_(nullptr, &std::fclose) {
  fcntl(from_, F_SETFL, O_NONBLOCK);
  if (copy.empty()) return;
  copy_.reset(std::fopen(copy.c_str(), "we"));
  if (!copy_) throw std::runtime_error("[launch] cannot write " + copy + ": " + std::strerror(errno));
}

Output::~Output() {
  if (from_ >= 0) close(from_);
}

void Output::pass(std::string_view line, std::string& out) {
  tail_.emplace_back(line);
  if (tail_.size() > kShownLines) tail_.pop_front();
  add(to_ == STDERR_FILENO ? tracebacks_.take(line) : std::vector<std::string>{std::string(line)}, out);
}

void Output::add(const std::vector<std::string>& lines, std::string& out) const {
  for (const std::string& line : lines)
    out.append(prefix_).append(line).append("\n");
}

void Output::read() {
  char block[kBlock];
  const ssize_t got = ::read(from_, block, sizeof(block));
  if (got == 0) return finish();
  if (got < 0) return;  // nothing is there
  const std::string_view text(block, static_cast<size_t>(got));
  if (copy_) {
    std::fwrite(text.data(), 1, text.size(), copy_.get());
    std::fflush(copy_.get());
  }
  std::string out;
  open_.append(text);
  size_t begin = 0;
  for (size_t end; (end = open_.find('\n', begin)) != std::string::npos; begin = end + 1)
    pass(std::string_view(open_).substr(begin, end - begin), out);
  open_.erase(0, begin);
  if (open_.size() > kLongest) {
    pass(open_, out);
    open_.clear();
  }
  put(out);
}

// Where nobody reads any more the rank's own writes fail from here on, as they would without a launcher.
void Output::put(const std::string& out) {
  const int error = out.empty() || lost_ ? 0 : write_all(to_, out);
  if (error == 0) return;
  if (error == EPIPE && from_ >= 0) {
    close(from_);
    from_ = -1;
  }
  lost_ = true;
  if (error == EPIPE || to_ == STDERR_FILENO) return;
  write_all(STDERR_FILENO, std::string("[launch] cannot write to standard output: ") + std::strerror(error) +
                               "; what " + prefix_ + "prints there is lost from here on\n");
}

void Output::finish() {
  std::string out;
  if (!open_.empty()) pass(open_, out);
  open_.clear();
  add(tracebacks_.rest(), out);
  put(out);
  if (from_ >= 0) close(from_);
  from_ = -1;
}

}  // namespace tessera::run

#include "tessera/io/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::io {

namespace {

constexpr mode_t kMode = 0666;

int lock(int fd, int how) {
  int result = 0;
  do
    result = ::flock(fd, how);
  while (result != 0 && errno == EINTR);
  return result;
}

}  // namespace

Lock Lock::wait(const std::string& path) {
  for (;;) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, kMode);
    TESSERA_CHECK_IO(fd >= 0, "io", "cannot create '", path, "': ", std::strerror(errno));
    Lock made(path, fd);
    // Whoever held the lock may have removed or renamed the file: what counts is the file of that name.
    if (lock(fd, LOCK_EX) != 0 || made.is_in_place()) return made;
  }
}

std::optional<Lock> Lock::take_left(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return std::nullopt;
  Lock found(path, fd);
  if (lock(fd, LOCK_EX | LOCK_NB) != 0 || !found.is_in_place()) return std::nullopt;
  return found;
}

Lock::Lock(Lock&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

Lock::~Lock() {
  if (fd_ < 0) return;
  ::flock(fd_, LOCK_UN);  // a child that was forked meanwhile has the descriptor too
  ::close(fd_);
}

void Lock::remove() {
  ::unlink(path_.c_str());
}

bool Lock::is_in_place() const {
  struct stat mine{}, there{};
  return ::fstat(fd_, &mine) == 0 && ::lstat(path_.c_str(), &there) == 0 && mine.st_dev == there.st_dev &&
         mine.st_ino == there.st_ino;
}

}  // namespace tessera::io

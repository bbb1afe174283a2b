// Lock: a file that one holder has at a time, among all threads and processes, also of other hosts where the file system's
// locks (flock) hold between hosts. The system lets go of the lock when the process ends, whatever ends that.
#pragma once

#include <optional>
#include <string>

namespace tessera::io {

class Lock {
 public:
  // Locks the file `path`, made where it is missing; waits while another holder has it. On a file system without locks the file
  // is not held, and its presence alone is the lock (see take_left()). IoError where it cannot be made.
  static Lock wait(const std::string& path);
  // Locks a file that is there and that nobody holds. Nothing where it is missing or held, or the file system has no locks.
  static std::optional<Lock> take_left(const std::string& path);
  Lock(Lock&& other) noexcept;
  Lock& operator=(Lock&& other) = delete;
  ~Lock();  // the file stays

  int descriptor() const { return fd_; }  // for writing
  bool is_in_place() const;               // whether the path is that of the file that is held
  void remove();                          // removes the file, which is held until the destructor

 private:
  Lock(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_ = -1;
};

}  // namespace tessera::io

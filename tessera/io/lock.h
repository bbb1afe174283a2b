// Lock: a file that one holder has at a time, among all threads and processes, also of other hosts where the file system's
// locks (flock) hold between hosts. The system lets go of it when the process ends, whatever ends that.
#pragma once

#include <optional>
#include <string>

namespace tessera::io {

class Lock {
 public:
  // The file `path`, made where it is missing; waits while another one holds it. On a file system without locks it is not
  // held, and the file alone says so (see take_left()). IoError where it cannot be made.
  static Lock wait(const std::string& path);
  // A file that is there and that nobody holds. Nothing where it is missing, held, or may be: on a file system without locks.
  static std::optional<Lock> take_left(const std::string& path);
  Lock(Lock&& other) noexcept;
  Lock& operator=(Lock&& other) = delete;
  ~Lock();  // the file stays

  int descriptor() const { return fd_; }  // for writing
  bool is_in_place() const;               // the path is that of the file that is held
  void remove();                          // the file; it is held until the destructor

 private:
  Lock(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_ = -1;
};

}  // namespace tessera::io

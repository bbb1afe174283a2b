// Memory that the processes of one host share.
//
// Note [No name]
//   A segment is an anonymous file (memfd) that other processes open through /proc/<pid>/fd/<fd>. So there is nothing in
//   /dev/shm that a crash could leave behind or a later run could join by mistake, its size limit (64 MB in many
//   containers) does not apply, and only processes of the same user can open it.
// Note [Reserved before use]
//   Touching a page that the system cannot provide ends a process with SIGBUS. So creating a segment takes address space
//   only, and every part is reserved before its first use, which fails with an error instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tessera::comm {

// Where a segment is, and a random number that proves that it is that segment.
struct ShmAddress {
  int64_t pid = 0, fd = -1, secret = 0;
};

class ShmSegment {
 public:
  // A zeroed segment of `bytes`, a multiple of the page size. Errors of all calls: DistBackendError.
  static std::shared_ptr<ShmSegment> create(size_t bytes);
  // The segment that the running process `pid` has open as `fd`.
  static std::shared_ptr<ShmSegment> attach(int pid, int fd, size_t bytes);
  // The segment that its creator has offered at `address`.
  static std::shared_ptr<ShmSegment> attach(const ShmAddress& address, size_t bytes);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  // Maps the same bytes, where writes stay the caller's own. The memory lives without this object.
  std::shared_ptr<char> map_private() const;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_; }
  // Returns the segment's address; writes the secret to its first 8 bytes, which have memory.
  ShmAddress offer() const;
  // Lets nobody attach from here on; those who have keep the memory.
  void close_file();
  // Makes sure that [offset, offset + bytes) has memory.
  void reserve(size_t offset, size_t bytes) const;

 private:
  ShmSegment(int fd, size_t bytes);

  int fd_;
  const size_t size_;
  char* data_ = nullptr;
};

}  // namespace tessera::comm

#include "tessera/comm/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <string>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

// Memory of this host that is free or can be freed, in bytes; where that is not known, more than anybody asks for.
size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string name; file >> name;) {
    size_t kilobytes = 0;
    if (name == "MemAvailable:" && file >> kilobytes) return kilobytes * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::numeric_limits<size_t>::max();
}

}  // namespace

ShmSegment::ShmSegment(int fd, size_t bytes) : fd_(fd), size_(bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(fd);
    TESSERA_CHECK_DIST(false, "comm", "shared memory: ", bytes, " B are needed: cannot map: ", std::strerror(error));
  }
  data_ = static_cast<char*>(data);
}

ShmSegment::~ShmSegment() {
  munmap(data_, size_);
  close_file();
}

void ShmSegment::close_file() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

std::shared_ptr<char> ShmSegment::map_private() const {
  void* const data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd_, 0);
  TESSERA_CHECK_DIST(data != MAP_FAILED, "comm", "shared memory: ", size_,
                     " B are needed: cannot map: ", std::strerror(errno));
  return {static_cast<char*>(data), [size = size_](char* mapped) { munmap(mapped, size); }};
}

std::shared_ptr<ShmSegment> ShmSegment::create(size_t bytes) {
  const int fd = memfd_create("tessera", MFD_CLOEXEC);
  TESSERA_CHECK_DIST(fd >= 0, "comm", "shared memory: cannot create a segment: ", std::strerror(errno));
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(fd);
    TESSERA_CHECK_DIST(false, "comm", "shared memory: cannot make a segment of ", bytes, " B: ", std::strerror(error));
  }
  return std::shared_ptr<ShmSegment>(new ShmSegment(fd, bytes));
}

std::shared_ptr<ShmSegment> ShmSegment::attach(int pid, int fd, size_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TESSERA_CHECK_DIST(own >= 0, "comm", "shared memory: cannot open ", path, ": ", std::strerror(errno),
                     "; all ranks must run on one host, under one user, and see each other's processes");
  struct stat status{};
  if (fstat(own, &status) != 0 || static_cast<size_t>(status.st_size) != bytes) {
    close(own);
    TESSERA_CHECK_DIST(false, "comm", "shared memory: ", path, " is not a segment of ", bytes, " B");
  }
  return std::shared_ptr<ShmSegment>(new ShmSegment(own, bytes));
}

ShmAddress ShmSegment::offer() const {
  std::random_device random;
  const auto secret = static_cast<int64_t>(static_cast<uint64_t>(random()) << 32 | random());
  std::memcpy(data_, &secret, sizeof(secret));
  return {getpid(), fd_, secret};
}

std::shared_ptr<ShmSegment> ShmSegment::attach(const ShmAddress& address, size_t bytes) {
  auto segment = attach(static_cast<int>(address.pid), static_cast<int>(address.fd), bytes);
  int64_t secret = 0;
  std::memcpy(&secret, segment->data(), sizeof(secret));
  TESSERA_CHECK_DIST(secret == address.secret, "comm", "shared memory: process ", address.pid,
                     " has another segment than the one it has offered; do all ranks run on one host?");
  return segment;
}

void ShmSegment::reserve(size_t offset, size_t bytes) const {
  // An anonymous file has no limit of its own: asked for too much, the system would end processes instead of refusing.
  const size_t available = available_memory();
  TESSERA_CHECK_DIST(bytes <= available, "comm", "shared memory: ", bytes, " B are needed, ", available,
                     " B are available");
  int result = 0;
  do {
    result = fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  TESSERA_CHECK_DIST(result == 0, "comm", "shared memory: ", bytes, " B are needed: ", std::strerror(errno));
}

}  // namespace tessera::comm

#include "tessera/io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::io {

namespace {

// One call moves at most 2 GiB - 4 KiB on Linux.
constexpr int64_t kLargestCall = int64_t{1} << 30;

// Opens a file with a name for a moment only, where the file system knows no files without one.
int open_unnamed(const std::string& folder, bool knows_unnamed) {
  if (knows_unnamed) {
    const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return fd;
  }
  std::string name = (std::filesystem::path(folder) / "tessera-XXXXXX").string();
  const int named = ::mkostemp(name.data(), O_CLOEXEC);  // 0600
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

int open_or_throw(const std::string& path, int flags, const char* what) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  TESSERA_CHECK_IO(fd >= 0, "io", "cannot ", what, " '", path, "': ", std::strerror(errno));
  return fd;
}

}  // namespace

File File::open(const std::string& path) {
  File file(path, open_or_throw(path, O_RDONLY | O_NONBLOCK, "open"));  // a named pipe would wait for a writer
  struct stat info{};
  TESSERA_CHECK_IO(::fstat(file.fd_, &info) == 0 && S_ISREG(info.st_mode), "io", "'", path, "' is not a regular file");
  return file;
}

File File::create(const std::string& path) {
  return {path, open_or_throw(path, O_WRONLY | O_CREAT | O_EXCL, "create")};
}

File File::open_direct(const std::string& path) {
  File file = open(path);
  file.add_direct(O_RDONLY);
  return file;
}

File File::create_direct(const std::string& path) {
  File file = create(path);
  file.add_direct(O_WRONLY);
  return file;
}

File File::scratch(const std::string& folder, bool knows_unnamed) {
  const int fd = open_unnamed(folder, knows_unnamed);
  TESSERA_CHECK_IO(fd >= 0, "io", "cannot make a file in '", folder, "': ", std::strerror(errno));
  File file((std::filesystem::path(folder) / "(no name)").string(), fd);
  file.direct_ = ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  return file;
}

// Not every file system has direct transfers: then all go through the page cache.
void File::add_direct(int flags) {
  direct_ = ::open(path_.c_str(), flags | O_DIRECT | O_CLOEXEC);
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), direct_(std::exchange(other.direct_, -1)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(direct_, other.direct_);
  return *this;
}

File::~File() {
  for (const int fd : {fd_, direct_})
    if (fd >= 0) ::close(fd);
}

int File::descriptor(const void* memory, int64_t bytes, int64_t offset) const {
  const auto all = reinterpret_cast<uintptr_t>(memory) | static_cast<uintptr_t>(bytes) | static_cast<uintptr_t>(offset);
  return direct_ >= 0 && all % kDirectAlignment == 0 ? direct_ : fd_;
}

// Whether a file system asks for more than our alignment: then the transfer goes through the page cache.
bool File::falls_back(int fd, int error) const {
  return error == EINVAL && fd == direct_;
}

void File::reserve(int64_t bytes) const {
  int result = bytes > 0 ? ::fallocate(fd_, 0, 0, bytes) : 0;
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) result = size() < bytes ? ::ftruncate(fd_, bytes) : 0;
  TESSERA_CHECK_IO(result == 0, "io", "cannot reserve ", bytes, " bytes for '", path_, "': ", std::strerror(errno));
}

int64_t File::size() const {
  struct stat info{};
  TESSERA_CHECK_IO(::fstat(fd_, &info) == 0, "io", "cannot look at '", path_, "': ", std::strerror(errno));
  return info.st_size;
}

void File::read(void* to, int64_t bytes, int64_t offset) const {
  auto* place = static_cast<char*>(to);
  for (int64_t done = 0; done < bytes;) {
    const int64_t part = std::min(bytes - done, kLargestCall);
    const int fd = descriptor(place + done, part, offset + done);
    ssize_t n = ::pread(fd, place + done, part, offset + done);
    if (n < 0 && falls_back(fd, errno)) n = ::pread(fd_, place + done, part, offset + done);
    if (n < 0 && errno == EINTR) continue;
    TESSERA_CHECK_IO(n >= 0, "io", "cannot read ", bytes, " bytes of '", path_, "' from byte ", offset, ": ",
                     std::strerror(errno));
    TESSERA_CHECK_IO(n > 0, "io", "'", path_, "' ends at byte ", offset + done, ", before the ", bytes,
                     " bytes from byte ", offset, " that it should have");
    done += n;
  }
}

void File::write(const void* from, int64_t bytes, int64_t offset) const {
  const auto* place = static_cast<const char*>(from);
  for (int64_t done = 0; done < bytes;) {
    const int64_t part = std::min(bytes - done, kLargestCall);
    const int fd = descriptor(place + done, part, offset + done);
    ssize_t n = ::pwrite(fd, place + done, part, offset + done);
    if (n < 0 && falls_back(fd, errno)) n = ::pwrite(fd_, place + done, part, offset + done);
    if (n < 0 && errno == EINTR) continue;
    TESSERA_CHECK_IO(n > 0, "io", "cannot write ", bytes, " bytes to '", path_, "' from byte ", offset, ": ",
                     std::strerror(n == 0 ? ENOSPC : errno));
    done += n;
  }
}

void File::sync() const {
  TESSERA_CHECK_IO(::fsync(fd_) == 0, "io", "cannot bring '", path_, "' to the disk: ", std::strerror(errno));
}

void File::close() {
  if (const int direct = std::exchange(direct_, -1); direct >= 0) ::close(direct);
  const int fd = std::exchange(fd_, -1);
  TESSERA_CHECK_IO(fd < 0 || ::close(fd) == 0, "io", "cannot close '", path_, "': ", std::strerror(errno));
}

std::string read_text(const std::string& path, int64_t limit) {
  const File file = File::open(path);
  const int64_t size = file.size();
  TESSERA_CHECK_IO(size <= limit, "io", "'", path, "' has ", size, " bytes, more than the ", limit,
                   " that it can have");
  std::string text(static_cast<size_t>(size), '\0');
  file.read(text.data(), size, 0);
  return text;
}

// A device or a folder would be lost, or stand in the way only after the work.
static std::string checked_to_replace(std::string path) {
  std::error_code unknown;
  const auto there = std::filesystem::status(path, unknown);
  TESSERA_CHECK_IO(!std::filesystem::exists(there) || std::filesystem::is_regular_file(there), "io", "'", path,
                   "' is no file that could be replaced; give the path of a file");
  return path;
}

WholeFile::WholeFile(std::string path)
    : path_(checked_to_replace(std::move(path))), part_(path_ + ".part"), lock_(Lock::wait(part_)) {
  TESSERA_CHECK_IO(::ftruncate(lock_->descriptor(), 0) == 0, "io", "cannot write '", part_,
                   "': ", std::strerror(errno));
}

void WholeFile::drop() {
  if (lock_) lock_->remove();
  lock_.reset();
}

void WholeFile::finish() {
  TESSERA_CHECK_IO(lock_->is_in_place(), "io", "'", part_, "' was removed or replaced while it was written");
  TESSERA_CHECK_IO(::fsync(lock_->descriptor()) == 0, "io", "cannot bring '", part_,
                   "' to the disk: ", std::strerror(errno));
  TESSERA_CHECK_IO(::rename(part_.c_str(), path_.c_str()) == 0, "io", "cannot rename '", part_, "' to '", path_,
                   "': ", std::strerror(errno));
  lock_.reset();
  sync_folder(std::filesystem::path(path_).parent_path().string());
}

void replace_text(const std::string& path, const std::string& text) {
  WholeFile whole(path);
  const int fd = whole.lock_->descriptor();
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = ::pwrite(fd, text.data() + done, text.size() - done, static_cast<off_t>(done));
    TESSERA_CHECK_IO(written > 0 || (written < 0 && errno == EINTR), "io", "cannot write '", whole.part(),
                     "': ", std::strerror(written == 0 ? ENOSPC : errno));
    if (written > 0) done += static_cast<size_t>(written);
  }
  whole.finish();
}

void sync_folder(const std::string& folder) {
  const std::string path = folder.empty() ? "." : folder;
  const int fd = open_or_throw(path, O_RDONLY | O_DIRECTORY, "open the folder");
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // Some file systems cannot sync a folder, and order names themselves.
  TESSERA_CHECK_IO(result == 0 || error == EINVAL || error == ENOTSUP, "io", "cannot bring the names of '", path,
                   "' to the disk: ", std::strerror(error));
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TESSERA_CHECK_IO(!error, "io", "cannot make the folder '", folder, "': ", error.message());
}

}  // namespace tessera::io

// Test support: files that this process has open, and a limit on their size.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::testing {

// Descriptors of regular files in `folder`, whether or not they have a name there.
inline std::vector<int> files_in(const std::string& folder) {
  std::vector<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string path = std::filesystem::read_symlink(entry.path(), gone).string();
    if (!gone && path.starts_with(folder + "/")) found.push_back(std::stoi(entry.path().filename().string()));
  }
  return found;
}

inline void truncate_files_in(const std::string& folder, off_t bytes) {
  for (const int fd : files_in(folder))
    if (::ftruncate(fd, bytes) != 0) throw std::runtime_error("cannot cut a file");
}

// While it lives, no file of this process grows beyond `bytes`: writes there fail as on a full disk ("File too large").
class LargestFile {
 public:
  explicit LargestFile(rlim_t bytes) {
    handler_ = ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~LargestFile() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }
  LargestFile(const LargestFile&) = delete;
  LargestFile& operator=(const LargestFile&) = delete;

 private:
  rlimit before_{};
  sighandler_t handler_;
};

}  // namespace tessera::testing

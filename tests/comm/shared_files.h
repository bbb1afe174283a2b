#pragma once

#include <filesystem>

namespace tessera::testing {

// How many files there are in /dev/shm, those of other programs too.
inline auto shared_files() {
  const std::filesystem::directory_iterator files("/dev/shm");
  return std::distance(begin(files), end(files));
}

}  // namespace tessera::testing

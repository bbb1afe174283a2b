// The files of ours in /dev/shm, which a crash could leave behind. Those of other programs come and go meanwhile.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

namespace tessera::testing {

inline auto shared_files() {
  const std::filesystem::directory_iterator files("/dev/shm");
  return std::count_if(begin(files), end(files), [](const auto& file) {
    return file.path().filename().string().find("tessera") != std::string::npos;
  });
}

}  // namespace tessera::testing

// tessera-run: the ranks of this host, as torchrun starts them, without Python.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "commands/run/options.h"
#include "commands/run/ranks.h"
#include "tessera/base/version.h"

namespace {

// A pipe or file that is opened must not get the number of a standard one that is closed.
void open_standard_files() {
  int fd = 0;
  do
    fd = open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) close(fd);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tessera::run;
  open_standard_files();
  constexpr int kWrongUsage = 2;
  Options options;
  try {
    options = parse(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const UsageError& error) {
    std::fprintf(stderr, "%s\n%s", error.what(), kUsage);
    return kWrongUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  if (options.help) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  if (options.version) {
    std::puts(TESSERA_VERSION);
    return 0;
  }
  int code = 1;
  try {
    Ranks ranks(options);
    try {
      return ranks.run();
    } catch (...) {
      code = ranks.code_of_start();
      throw;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return code;
  }
}

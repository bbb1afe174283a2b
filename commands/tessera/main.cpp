// tessera: what a user asks of checkpoints, configurations and this machine without a program of their own, and without Python.
#include "tessera/commands/commands.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "tessera/base/version.h"

namespace {

constexpr int kWrongUsage = 2;

// `code`, but for an output that could not be written.
int written(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "[command] cannot write to standard output: %s\n", std::strerror(errno));
  return 1;
}

std::string usage() {
  std::string text = "usage: tessera COMMAND ...\n\n";
  for (const auto& [command, summary] : tessera::commands::names())
    text += "  " + command + std::string(12 - command.size(), ' ') + summary + "\n";
  return text + "\ntessera COMMAND --help says what it takes; tessera --version. Ranks are started by tessera-run.\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (!arguments.empty() && arguments[0] == "--version") {
    std::printf("%s\n", tessera::version());
    return written(0);
  }
  if (arguments.empty() || arguments[0] == "-h" || arguments[0] == "--help") {
    std::fputs(usage().c_str(), arguments.empty() ? stderr : stdout);
    return written(arguments.empty() ? kWrongUsage : 0);
  }
  try {
    const auto [code, output, errors] = tessera::commands::run(arguments);
    std::fputs(output.c_str(), stdout);
    std::fputs(errors.c_str(), stderr);
    return written(code);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

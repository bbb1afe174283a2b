// What tessera-run is asked for.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::run {

struct Options {
  bool help = false, version = false;
  int ranks = 0;             // ranks of this host
  int nodes = 0, node = -1;  // 0: nobody said it; afterwards 1
  std::string master_addr;
  int master_port = 0;  // 0: a free one, which the launcher finds
  std::string log_dir;
  int grace_seconds = 10;
  std::vector<std::string> command;
};

extern const char* const kUsage;

// A command line that cannot be read, as against values that make no sense (std::invalid_argument).
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Options parse(const std::vector<std::string>& arguments);

// How many ranks a host has where nobody says it: its devices, else one.
int own_devices();

}  // namespace tessera::run

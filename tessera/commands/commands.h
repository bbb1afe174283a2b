// The commands of `tessera`: what a checkpoint holds, its weights for other tools, whether a configuration is valid, what a rank will
// hold, how runs went, what this machine has. One program for both front ends: commands/tessera is its C++ one, Python's `tessera` calls run().
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/config/estimate.h"

namespace tessera::commands {

// What a front end adds.
struct FrontEnd {
  // Sizes of a model that is more than a number, e.g. a folder: those of one rank's slice. Empty: only numbers are known.
  std::function<config::ModelSizes(const std::string& model, const config::Config& config)> sizes_of{};
  // Lines of the report: name and JSON value, in place of ours of that name or behind the version of torch. "missing for more": a list
  // of texts, behind ours.
  std::vector<std::pair<std::string, std::string>> facts{};
};

struct Result {
  int code = 0;  // 0: done; 1: an error, whose text is in `errors`; 2: the command line cannot be read
  std::string output{}, errors{};
};

// The names that run() knows, with a line on each.
struct Name {
  std::string command, summary;
};
std::vector<Name> names();

// Runs a command. `arguments`: the command's name and what follows. Errors of a user's, of a disk and of what is not served are a
// result; others are thrown.
Result run(const std::vector<std::string>& arguments, const FrontEnd& front = {});

// Bytes of a size: 5GB is 5 * 10^9 bytes, 5GiB is 5 * 2^30. Value error for anything else, and 0.
int64_t shard_bytes(const std::string& size);

}  // namespace tessera::commands

// What of a valid configuration this version carries out.
#pragma once

#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/config/text.h"

namespace tessera::config {

// Not-implemented error that names every key of `config` that asks for something not served.
void check_served(const Config& config);
// The same for the C++ front end, of what only the Python one serves. Returns a warning for each key that changes no
// result and that C++ does not read.
std::vector<std::string> check_cpp_serves(const Config& config);

// The rows behind check_served, for docs/config.md.
struct Refusal {
  const char* key;   // path in the configuration
  const char* when;  // the values that are refused
  bool (*refused)(const Config&);
};
const std::vector<Refusal>& refusals();
const std::vector<Refusal>& python_only();
const std::vector<Refusal>& python_reads();

// Keys that are accepted and read by nothing. Another value than the default is a warning with what to do instead.
struct Unread {
  const char* key;
  const char* instead;
};
const std::vector<Unread>& unread();
void warn_of_unread(const Config& config, Report& report);

// Every key by what this version does with it, as a table of docs/config.md.
std::string state_table();

}  // namespace tessera::config

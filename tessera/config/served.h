// What of a valid configuration this version carries out.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/config/keys.h"
#include "tessera/config/text.h"

namespace tessera::config {

// Throws a not-implemented error that names every key of `config` that asks for something not served.
void check_served(const Config& config);
// Does so for the C++ front end, with what only the Python one serves. Returns the lines to be logged, once: the warnings of the
// configuration, also of one that was filled by hand, and of what C++ does not read.
std::vector<std::string> check_cpp_serves(const Config& config);

// The rows behind check_served, for docs/config_served.md.
struct Refusal {
  const char* key;   // path in the configuration
  const char* when;  // the values that are refused
  bool (*refused)(const Config&);
  const char* instead = "";  // of what has no effect: why, or what does it
};
const std::vector<Refusal>& refusals();
const std::vector<Refusal>& python_only();
const std::vector<Refusal>& python_reads();

// Keys that are accepted and read by nothing. Asking for something else than what is done is a warning with what is done, or
// what to do, instead.
struct Unread {
  const char* key;  // "section.*": all keys of the section that have no row elsewhere
  const char* instead;
  std::optional<bool> done = {};  // the value that is done; unset: the default
};
const std::vector<Unread>& unread();
const Unread* unread_row(const std::string& path);  // null: none
// Whether what the key asks for depends on its value.
bool has_effect(const Key& key);
void warn_of_unread(const Config& config, Report& report);

// Every key by what this version does with it, as a table of docs/config_served.md.
std::string state_table();

}  // namespace tessera::config

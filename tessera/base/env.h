// The only door to the environment. docs/environment.md lists every variable read here.
#pragma once

#include <optional>
#include <string>

namespace tessera::env {

// Value of `name`, or nothing when it is unset or empty.
std::optional<std::string> get(const char* name);

// Value of `name` as an integer, or nothing. Value error when it is set but no integer.
std::optional<int> get_int(const char* name);

}  // namespace tessera::env

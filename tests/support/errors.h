// Test support: what an error says.
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace tessera::testing {

// The message of what `body` throws; empty when it throws nothing.
inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

}  // namespace tessera::testing

// Test support: what an error says.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>

// `text` contains `part`.
#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

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

// Test support: what an error or a warning says.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

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

// The warnings of this thread while it lives.
struct KeptWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { lines.push_back(warning.msg()); }
  std::vector<std::string> lines;
  c10::WarningUtils::WarningHandlerGuard guard{this};
};

}  // namespace tessera::testing

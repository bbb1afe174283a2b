// Test support: what an error or a warning says.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <type_traits>
#include <vector>

// `text` contains `part`.
#define EXPECT_HAS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

namespace tessera::testing {

// The message of what `body` throws as an E; empty when it throws nothing.
template <class E = std::exception, class F>
std::string error_of(const F& body) {
  try {
    body();
  } catch (const E& error) {
    if constexpr (std::is_base_of_v<c10::Error, E>) return error.what_without_backtrace();
    return error.what();
  }
  return "";
}

// The message of what `call` throws as an E; fails when it throws nothing or something else.
template <class E, class F>
std::string message_of(const F& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "other exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// The warnings of this thread while it lives.
struct KeptWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { lines.push_back(warning.msg()); }
  std::vector<std::string> lines;
  c10::WarningUtils::WarningHandlerGuard guard{this};
};

}  // namespace tessera::testing

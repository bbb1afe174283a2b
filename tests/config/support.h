// What the tests of the configuration share.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

#include "tessera/config/config.h"

namespace tessera::config {

// Message of the error that `run` throws; "" when it throws none.
template <class Error = c10::ValueError, class Run>
std::string error_of(Run&& run) {
  try {
    run();
  } catch (const Error& e) {
    return e.what_without_backtrace();
  }
  return "";
}

inline std::string json_error(const std::string& text) {
  return error_of([&] { Config::from_json(text); });
}

}  // namespace tessera::config

#define EXPECT_HAS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)
#define EXPECT_HAS_NOT(text, part) EXPECT_EQ(std::string(text).find(part), std::string::npos) << (text)

// What the tests of the configuration share.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "tessera/config/config.h"
#include "tests/support/errors.h"

namespace tessera::config {

// Of a value error, by default.
template <class Error = c10::ValueError, class Run>
std::string error_of(const Run& run) {
  return testing::error_of<Error>(run);
}

inline std::string json_error(const std::string& text) {
  return error_of([&] { Config::from_json(text); });
}

// docs/config.md.
inline std::string page() {
  const std::ifstream file(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs" / "config.md");
  EXPECT_TRUE(file.good()) << "docs/config.md is missing";
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The table between the page's marks of that name.
inline void expect_table(const std::string& name, const std::string& table) {
  const std::string text = page(), begin = "<!-- " + name + " table: begin -->\n";
  const size_t from = text.find(begin), to = text.find("<!-- " + name + " table: end -->");
  ASSERT_TRUE(from != std::string::npos && to != std::string::npos);
  if (text.substr(from + begin.size(), to - from - begin.size()) == table) return;
  const auto fresh = std::filesystem::temp_directory_path() / ("tessera_config_" + name + ".md");
  std::ofstream(fresh) << table;
  ADD_FAILURE() << "the table of docs/config.md is old; the new one is in " << fresh;
}

}  // namespace tessera::config

#define EXPECT_HAS_NOT(text, part) EXPECT_EQ(std::string(text).find(part), std::string::npos) << (text)

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

// The pages of the configuration, one after the other.
inline std::string page() {
  std::ostringstream text;
  for (const char* name : {"config.md", "config_served.md", "config_keys.md", "config_sections.md"}) {
    const std::ifstream file(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs" / name);
    EXPECT_TRUE(file.good()) << "docs/" << name << " is missing";
    text << file.rdbuf();
  }
  return text.str();
}

// The table between the pages' marks of that name, whose two lines of head every page of it has.
inline void expect_table(const std::string& name, const std::string& table) {
  const std::string text = page(), begin = "<!-- " + name + " table: begin -->\n";
  const std::string head = table.substr(0, table.find('\n', table.find('\n') + 1) + 1);
  std::string found;
  for (size_t from = text.find(begin); from != std::string::npos; from = text.find(begin, from)) {
    from += begin.size();
    const std::string part = text.substr(from, text.find("<!-- " + name + " table: end -->", from) - from);
    ASSERT_EQ(part.substr(0, head.size()), head);
    found += found.empty() ? part : part.substr(head.size());
  }
  if (found == table) return;
  const auto fresh = std::filesystem::temp_directory_path() / ("tessera_config_" + name + ".md");
  std::ofstream(fresh) << table;
  ADD_FAILURE() << "the table of docs/config*.md is old; the new one is in " << fresh;
}

}  // namespace tessera::config

#define EXPECT_HAS_NOT(text, part) EXPECT_EQ(std::string(text).find(part), std::string::npos) << (text)

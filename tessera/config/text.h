// Small helpers for the messages of the configuration.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::config {

// Letters to change, insert, drop or swap to get from `a` to `b`.
int edit_distance(std::string_view a, std::string_view b);

// The candidate nearest to `word`, or "" when none is near enough to be meant.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// `text` with "?" for every byte that belongs to no whole UTF-8 character, as where a message was cut.
std::string whole_characters(std::string_view text);

std::string lower(std::string_view text);
std::string join(const std::vector<std::string>& parts, std::string_view separator);

// Lines "path: what is wrong, what is allowed"; one value error carries all of them.
class Report {
 public:
  void error(const std::string& path, const std::string& text);
  void warning(const std::string& path, const std::string& text);
  bool failed() const { return !errors_.empty(); }
  const std::vector<std::string>& errors() const { return errors_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  // Value error if there is any error.
  void raise() const;

 private:
  std::vector<std::string> errors_;
  std::vector<std::string> warnings_;
};

}  // namespace tessera::config

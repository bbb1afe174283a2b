// Small helpers for the messages of the configuration.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::config {

// Letters to change, insert, drop or swap to get from `a` to `b`.
int edit_distance(std::string_view a, std::string_view b);

// The candidates nearest to `word`, all of one distance; none where none is near enough to be meant.
std::vector<std::string> all_nearest(std::string_view word, const std::vector<std::string>& candidates);
// The first of these, or "".
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);
// Whether `word` can hardly be anything but `candidate`, misspelt: one letter of six at most.
bool near_miss(std::string_view word, std::string_view candidate);

// `text` with "?" for every byte that belongs to no whole UTF-8 character, as where a message was cut.
std::string whole_characters(std::string_view text);

std::string lower(std::string_view text);
std::string join(const std::vector<std::string>& parts, std::string_view separator);

// One thing that is wrong with a key.
struct Problem {
  // A key that does not exist; a value that is wrong by itself; keys that contradict each other, or a text that is no
  // configuration; a number of ranks that the configuration does not fit.
  enum class Kind { Unknown, Value, Rule, Ranks };
  Kind kind;
  std::string path;
  std::string text;  // what is wrong, what is allowed
  std::string line() const { return path + ": " + text; }
};

// The value error of a configuration: one line for each problem.
class InvalidConfig : public c10::ValueError {
 public:
  InvalidConfig(c10::SourceLocation where, const std::string& message, std::vector<Problem> problems,
                std::vector<std::string> warnings);
  const std::vector<Problem>& problems() const { return problems_; }
  // Warnings of the same configuration; they are not in the message.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  std::vector<Problem> problems_;
  std::vector<std::string> warnings_;
};

// Everything found in a configuration; one error carries all that is wrong.
class Report {
 public:
  void error(const std::string& path, const std::string& text, Problem::Kind kind = Problem::Kind::Rule);
  void warning(const std::string& path, const std::string& text);
  bool failed() const { return !errors_.empty(); }
  const std::vector<Problem>& errors() const { return errors_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  // Throws InvalidConfig if there is any error.
  void raise() const;

 private:
  std::vector<Problem> errors_;
  std::vector<std::string> warnings_;
};

}  // namespace tessera::config

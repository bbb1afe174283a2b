// The key table: one row per key of the configuration. Parsing, range checks, describe() and the
// reference table of docs/config_keys.md all walk it, so a key is added by adding a member and a row;
// one that nothing reads is a row alone.
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/config/config.h"

namespace tessera::config {

// A member of enum type, as an index into the names of its values.
struct EnumField {
  std::vector<std::string> names;
  std::function<int()> get;
  std::function<void(int)> set;
};

using Field = std::variant<bool*, int64_t*, double*, std::string*, std::optional<bool>*, std::optional<int64_t>*,
                           std::optional<double>*, std::optional<std::string>*, std::vector<std::string>*,
                           std::optional<std::vector<std::string>>*, std::vector<int64_t>*, c10::ScalarType*,
                           std::optional<c10::ScalarType>*, EnumField, Value*, Params*>;

struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above = false;                  // min itself is not allowed
  std::vector<std::string> choices{};  // texts, compared without letter case
  bool no_bool = false;                // a number that refuses true and false
  bool inf_unsets = false;             // infinity means unset
  bool takes_auto = false;             // "auto" is a choice: no number. Elsewhere the key counts as absent
  bool one_is_list = false;            // a single text is a list of one
  bool null_only = false;              // an object that JSON cannot carry
  bool checked_by_rule = false;        // the range depends on other keys (config/rules.cpp)
};

struct Key {
  std::string path;  // "zero_optimization.stage"
  std::function<Field(Config&)> field;
  std::string meaning;  // one line for docs/config_keys.md
  Limits limits{};
  std::vector<std::string> aliases{};   // other spellings of the last part
  std::optional<UnreadValue> unread{};  // the usual value of a key without a member
};
const std::vector<Key>& keys();

// Keys that are read but have no row: legacy spellings with rules of their own.
struct Legacy {
  std::string path;
  std::string meaning;
};
const std::vector<Legacy>& legacy_keys();

// Top-level sections known by name only; refused when switched on.
const std::vector<std::string>& foreign_names();

}  // namespace tessera::config

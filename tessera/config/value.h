// Value: a parameter of an optimizer or scheduler as the user gave it; the typed form comes from
// config/resolve.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::config {

struct Value;
using List = std::vector<Value>;
using Params = std::map<std::string, Value>;

// Integers stay integers and numbers stay numbers, so that a torch class receives what the user
// wrote.
struct Value {
  std::variant<std::monostate, bool, int64_t, double, std::string, List, Params> data;

  Value() = default;
  Value(bool v) : data(v) {}
  Value(int v) : data(int64_t{v}) {}
  Value(int64_t v) : data(v) {}
  Value(double v) : data(v) {}
  Value(const char* v) : data(std::string(v)) {}
  Value(std::string v) : data(std::move(v)) {}
  Value(List v) : data(std::move(v)) {}
  Value(Params v) : data(std::move(v)) {}

  bool is_null() const { return data.index() == 0; }
  // Whether there is no value; also for the text "auto", which means "use the default".
  bool is_unset() const;
  // The value as JSON text, e.g. [0.9, 0.999].
  std::string text() const;
};
bool operator==(const Value& a, const Value& b);

// Number as short text that reads back to the same value: 1e-08, 0.1, 500000000.
std::string number_text(double value);

}  // namespace tessera::config

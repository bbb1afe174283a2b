// Node: a value of a JSON text that was read from a file, and how errors name it. Kind and bounds are checked where a value is
// taken, so that no number wraps and none is converted silently. IoError that names file and key.
#pragma once

#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/io/json_depth.h"

namespace tessera::checkpoint {

struct Node {
  using Json = nlohmann::ordered_json;
  // Every reader of JSON holds integers up to here exactly.
  static constexpr int64_t kLargest = int64_t{1} << 53;
  // The bound of counts, which go on from there: no later save writes what is not read.
  static constexpr int64_t kLargestCount = kLargest / 2;

  const Json& json;
  const std::string& path;
  std::string where;

  [[noreturn]] void fail(const std::string& what) const {
    TESSERA_FAIL(IoError, "[checkpoint] '", path, "', ", where, ": ", what);
  }
  void check(bool good, const char* what) const {
    if (!good) fail(what);
  }
  const Node& object() const {
    check(json.is_object(), "is no JSON object");
    return *this;
  }
  bool has(const char* key) const { return json.is_object() && json.contains(key); }
  Node at(const char* key) const {
    if (!has(key)) fail(std::string("has no '") + key + "'");
    return {json[key], path, where + "." + key};
  }
  template <class F>
  void each(F&& f) const {
    check(json.is_array(), "is not a list");
    for (size_t i = 0; i < json.size(); ++i)
      f(Node{json[i], path, where + "[" + std::to_string(i) + "]"});
  }

  std::string text() const {
    check(json.is_string(), "is not a text");
    return json.get<std::string>();
  }
  bool flag() const {
    check(json.is_boolean(), "is neither true nor false");
    return json.get<bool>();
  }
  // A count from `least` to `most` that T holds.
  template <class T = int64_t>
  T number(int64_t most = kLargest, int64_t least = 0) const {
    if (!std::in_range<T>(most)) most = static_cast<int64_t>(std::numeric_limits<T>::max());
    check(json.is_number_integer() && json >= least && json <= most, "is not a number that can be");
    return json.get<T>();
  }
  int64_t counter() const { return number(kLargestCount); }
  // A number: finite, as all numbers of JSON are, and no more than a float holds.
  double real() const {
    check(json.is_number() && std::abs(json.get<double>()) <= std::numeric_limits<float>::max(), "is no number");
    return json.get<double>();
  }
  std::vector<int64_t> numbers(int64_t most = kLargest) const {
    std::vector<int64_t> all;
    each([&](const Node& node) { all.push_back(node.number(most)); });
    return all;
  }
};

// Parses a text that may be no JSON, or one nested deeper than any of ours: then the result is of no kind.
template <class Json = Node::Json>
Json parsed(const std::string& text) {
  constexpr int kDeepest = 500;
  if (io::is_deeper(text, kDeepest)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace tessera::checkpoint

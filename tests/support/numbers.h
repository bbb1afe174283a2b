// Values of a JSON text in turn made others: numbers that wrap in 31, 32, 53 or 64 bits or are none that can be, values of
// another kind, and such as are nested without end.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {

inline constexpr int kNestedDeep = 100'000;  // levels: what follows them by calls of itself has no stack left

// f(pointer, json with that number changed), once for each.
template <class F>
void each_wrong_number(const nlohmann::ordered_json& good, const F& f) {
  using Json = nlohmann::ordered_json;
  const Json flat = good.flatten();
  for (const auto& [pointer, value] : flat.items()) {
    if (!value.is_number()) continue;
    const auto real = value.template get<double>();
    const auto was = static_cast<uint64_t>(real);
    const std::vector<Json> others{was + (uint64_t{1} << 31),
                                   was + (uint64_t{1} << 32),
                                   was + (uint64_t{1} << 53),
                                   uint64_t{1} << 60,
                                   was + (uint64_t{1} << 63),
                                   UINT32_MAX,
                                   INT64_MAX,
                                   UINT64_MAX,
                                   -1,
                                   INT64_MIN,
                                   1e300,
                                   real + 0.5};
    for (const Json& other : others) {
      Json json = good;
      json[Json::json_pointer(pointer)] = other;
      f(pointer, json);
    }
  }
}

// The same of every value, lists and objects too, in the place of which values of other kinds come.
template <class F>
void each_wrong_kind(const nlohmann::ordered_json& good, const F& f) {
  using Json = nlohmann::ordered_json;
  std::set<std::string> pointers;
  const Json flat = good.flatten();
  for (const auto& [pointer, value] : flat.items())
    for (std::string at = pointer; !at.empty(); at.resize(at.rfind('/')))
      pointers.insert(at);
  const std::vector<Json> others{nullptr,       true,           "text",           "",           7,
                                 Json::array(), Json::object(), Json::array({7}), {{"key", 7}}, 0.5};
  for (const std::string& pointer : pointers)
    for (const Json& other : others) {
      Json json = good;
      json[Json::json_pointer(pointer)] = other;
      f(pointer, json);
    }
}

// `text`, a JSON object, with `key` before all it has, whose value is nested kNestedDeep lists deep.
inline std::string with_nested(const std::string& text, const std::string& key) {
  return "{\"" + key + "\":" + std::string(kNestedDeep, '[') + std::string(kNestedDeep, ']') + "," + text.substr(1);
}

}  // namespace tessera::testing

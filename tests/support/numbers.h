// Numbers of a JSON text in turn made others that wrap in 31, 32, 53 or 64 bits, or are none that can be.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::testing {

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
                                   UINT64_MAX,
                                   -1,
                                   1e300,
                                   real + 0.5};
    for (const Json& other : others) {
      Json json = good;
      json[Json::json_pointer(pointer)] = other;
      f(pointer, json);
    }
  }
}

}  // namespace tessera::testing

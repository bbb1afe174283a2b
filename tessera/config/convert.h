// Conversion of one JSON value into one member. Internal to config/; needs nlohmann-json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tessera/config/keys.h"

namespace tessera::config {

// Whether a value is null or "auto", so that the key counts as absent.
bool is_unset(const nlohmann::json& value);
// Does the same for a key that may have "auto" as one of its choices, which then is a value.
bool is_unset(const Key& key, const nlohmann::json& value);

Value to_value(const nlohmann::json& value);

// Lenient as clients are: integral floats for integers, 0/1 and "true" for bool, numbers as text,
// true for a float (noted in `warning`). Returns "" when the member was set, else "must be ..., got
// ...".
std::string assign(const Key& key, const Field& field, const nlohmann::json& value, std::string& warning);

}  // namespace tessera::config

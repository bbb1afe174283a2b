// For the Python binding only: a configuration from a ready JSON value. Not installed; needs
// nlohmann-json.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "tessera/config/config.h"

namespace tessera::config {

// Does what Config::from_json does. Infinite numbers are allowed where the key allows them (steps_per_print).
Config from_value(const nlohmann::json& value);

}  // namespace tessera::config

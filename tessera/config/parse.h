// Parses a JSON value to a Config by the key table. Internal to config/; needs nlohmann-json.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "tessera/config/config.h"
#include "tessera/config/text.h"

namespace tessera::config {

// Reads every key that it can; errors and warnings go to the report. Ranges
// and contradictions are left to check_limits() and check_rules().
Config parse(const nlohmann::json& root, Report& report);

}  // namespace tessera::config

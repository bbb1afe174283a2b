// JSON value to Config by the key table. Internal to config/; needs nlohmann-json.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "tessera/config/config.h"
#include "tessera/config/text.h"

namespace tessera::config {

// Reads every key it can; what is wrong goes to the report, warnings go to the report too. Ranges
// and contradictions are left to check_limits() and check_rules().
Config parse(const nlohmann::json& root, Report& report);

}  // namespace tessera::config

// Contradictions between keys. Internal to config/.
#pragma once

#include "tessera/config/config.h"
#include "tessera/config/text.h"

namespace tessera::config {

// Adds a line for every combination of values that no version could carry out. Ranges:
// config/lookup.h.
void check_rules(const Config& config, Report& report);

}  // namespace tessera::config

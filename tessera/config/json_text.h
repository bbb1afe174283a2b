// JSON text as people write it. Internal to config/ and its tests; needs nlohmann-json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tessera/config/text.h"

namespace tessera::config {

// Strict JSON from JSON with comments (// # /* */), commas before a closing bracket, and Infinity
// and NaN as Python writes them (they become the texts "Infinity", "-Infinity", "NaN"). Line
// numbers stay.
std::string strict_json(const std::string& text);

// Parses it. Syntax errors (with line), duplicate keys (with path) and nesting deeper than 64 go to
// the report.
nlohmann::json read_json(const std::string& text, Report& report);

}  // namespace tessera::config

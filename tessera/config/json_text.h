// JSON text as people write it. For config/, the Python binding and tests; not installed, needs nlohmann-json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tessera/config/text.h"

namespace tessera::config {

// Strict JSON from JSON with comments (// # /* */), commas before a closing bracket, and Infinity
// and NaN as Python writes them: `quote_words` makes texts of these ("Infinity", "-Infinity", "NaN"), which is strict;
// Python's parser reads them as they are. Line numbers stay. (nlohmann-json's own options know neither # nor these
// words, and commas before a bracket from 3.12 on; what finds those has to know texts and the other comments too.)
std::string strict_json(const std::string& text, bool quote_words = true);

// Parses JSON text. Syntax errors (with line), duplicate keys (with path) and nesting deeper than 64 go to
// the report; `what`: the text is called so.
nlohmann::json read_json(const std::string& text, Report& report, const std::string& what = "JSON");

}  // namespace tessera::config

// What of a valid configuration this version carries out.
#pragma once

#include <string>
#include <vector>

#include "tessera/config/config.h"

namespace tessera::config {

// Not-implemented error that names every key of `config` that asks for something not served.
void check_served(const Config& config);

// The rows behind check_served, for docs/config.md.
struct Refusal {
  const char* key;   // path in the configuration
  const char* when;  // the values that are refused
  bool (*refused)(const Config&);
};
const std::vector<Refusal>& refusals();

}  // namespace tessera::config

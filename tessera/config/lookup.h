// Questions to the key table (config/keys.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/config/keys.h"
#include "tessera/config/text.h"

namespace tessera::config {

// Finds a key; nullptr: there is no such key. `path` is the canonical one.
const Key* find_key(const std::string& path);

// Canonical paths of all objects ("zero_optimization.offload_param"); "" is the root.
const std::vector<std::string>& sections();

// The canonical spelling of a path whose parent is canonical; the path itself when it is no alias.
std::string canonical(const std::string& path);

// Keys, sections and aliases directly inside `section`, last parts only.
std::vector<std::string> names_in(const std::string& section);

// The name of a dtype: "fp32", "fp16", "bf16".
std::string dtype_name(c10::ScalarType dtype);
// The dtype of any usual spelling: fp32, float32, torch.float32, half, ...
std::optional<c10::ScalarType> dtype_of(const std::string& name);

// What a key takes, as a text: "integer >= 1", "one of ...".
std::string allowed(const Key& key);
// The value of a key in `config`: dtypes and enums as text, null where it has none.
Value value_of(const Key& key, const Config& config);
// The value as JSON text; "unset" where there is none.
std::string value_text(const Key& key, const Config& config);

// Adds a line for every value of `config` outside the limits of its row.
void check_limits(const Config& config, Report& report);

// The reference table of docs/config_keys.md in Markdown.
std::string reference_table();

}  // namespace tessera::config

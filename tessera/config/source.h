// What users give as a configuration, beside a tree.
#pragma once

#include <string>

#include "tessera/config/config.h"

namespace tessera::config {

// The JSON text that `given` is (it begins with "{"), names the file of, or is url-safe base64 of. Value error for anything else
// and for a file that cannot be read.
std::string json_of(const std::string& given);
// The same as a configuration. A syntax error of a file names it.
Config config_of(const std::string& given);

// The text of a file. Value error for a folder, and for what is empty or cannot be read.
std::string text_of_file(const std::string& path);

}  // namespace tessera::config

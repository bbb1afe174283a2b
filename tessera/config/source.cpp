#include "tessera/config/source.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/config/text.h"

namespace tessera::config {

namespace {

constexpr size_t kShown = 200;  // of a text that is no configuration
constexpr std::string_view kBlanks = " \t\r\n\f\v";

void require(bool good, const std::string& text) {
  if (good) return;
  Report report;
  report.error("file", text);
  report.raise();
}

// Decodes base64 by RFC 4648, in the alphabet for URLs or the usual one. Nothing for a text that is none.
std::optional<std::string> from_base64(std::string_view text) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  while (text.ends_with('='))
    text.remove_suffix(1);
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t value = kLetters.find(c == '-' ? '+' : c == '_' ? '/' : c);
    if (value == std::string_view::npos) return std::nullopt;
    bits = (bits << 6U) | static_cast<uint32_t>(value);
    if ((count += 6) < 8) continue;
    count -= 8;
    bytes += static_cast<char>((bits >> static_cast<unsigned>(count)) & 0xFFU);
  }
  if (count == 6) return std::nullopt;  // one letter is less than a byte
  return bytes;
}

bool is_text(const std::string& given) {
  const size_t first = given.find_first_not_of(kBlanks);
  return first != std::string::npos && given[first] == '{';
}

bool is_file(const std::string& given) {
  std::error_code ignored;
  return !is_text(given) && std::filesystem::exists(given, ignored);
}

}  // namespace

std::string text_of_file(const std::string& path) {
  std::error_code ignored;
  require(!std::filesystem::is_directory(path, ignored), path + " is a folder; give the JSON file itself");
  std::ifstream file(path);
  require(file.good(), "cannot read " + path);
  std::ostringstream text;
  text << file.rdbuf();  // fails where there is nothing to copy
  require(!text.str().empty(), path + " is empty or cannot be read");
  return text.str();
}

Config config_of(const std::string& given) {
  return is_file(given) ? Config::from_file(given) : Config::from_json(json_of(given));
}

std::string json_of(const std::string& given) {
  if (is_text(given)) return given;
  if (is_file(given)) return text_of_file(given);
  const std::string decoded = from_base64(given).value_or("");
  const bool text = decoded.find_first_not_of(kBlanks) != std::string::npos && whole_characters(decoded) == decoded;
  TESSERA_CHECK_VALUE(text, "initialize",
                      "config is neither a file that exists nor JSON text, nor url-safe base64 of it: '",
                      whole_characters(given.substr(0, kShown)), "'");
  return decoded;
}

}  // namespace tessera::config

#include "tessera/base/env.h"

#include <charconv>
#include <cstdlib>

#include "tessera/base/error.h"

namespace tessera::env {

std::optional<std::string> get(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): read only
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<int> get_int(const char* name) {
  const auto text = get(name);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  TESSERA_CHECK_VALUE(error != std::errc::result_out_of_range, "env", name, " is too large: '", *text, "'");
  TESSERA_CHECK_VALUE(error == std::errc() && end == text->data() + text->size(), "env", name,
                      " must be an integer, got '", *text, "'");
  return value;
}

}  // namespace tessera::env

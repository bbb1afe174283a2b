// How deep a JSON text is nested, before it is parsed: code that copies, compares or writes a value calls itself once a level. (A
// callback of nlohmann's parser looks through all of an object for each value in it.)
#pragma once

#include <string_view>

namespace tessera::io {

// Whether objects and lists of a JSON text lie in each other in more than `most` levels. Of another text it says nothing.
inline bool is_deeper(std::string_view json, int most) {
  int depth = 0;
  bool in_text = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_text) {
      i += c == '\\';
      in_text = c != '"';
    } else if (c == '"') {
      in_text = true;
    } else if (c == '{' || c == '[') {
      if (++depth > most) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

}  // namespace tessera::io

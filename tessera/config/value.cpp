#include "tessera/config/value.h"

#include <array>
#include <charconv>
#include <cmath>

#include "tessera/config/text.h"

namespace tessera::config {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
    }
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

// Not '"[" + text + "]"': g++ 12 takes the insertion in front for an overlapping copy.
std::string enclosed(char open, const std::string& text, char close) {
  std::string out(1, open);
  out += text;
  out += close;
  return out;
}

struct Printer {
  std::string operator()(std::monostate) const { return "null"; }
  std::string operator()(bool v) const { return v ? "true" : "false"; }
  std::string operator()(int64_t v) const { return std::to_string(v); }
  std::string operator()(double v) const { return number_text(v); }
  std::string operator()(const std::string& v) const { return quoted(v); }
  std::string operator()(const List& list) const {
    std::vector<std::string> parts;
    for (const Value& v : list) {
      parts.push_back(v.text());
    }
    return enclosed('[', join(parts, ", "), ']');
  }
  std::string operator()(const Params& params) const {
    std::vector<std::string> parts;
    for (const auto& [name, v] : params) {
      parts.push_back(quoted(name) + ": " + v.text());
    }
    return enclosed('{', join(parts, ", "), '}');
  }
};

}  // namespace

bool Value::is_unset() const {
  const auto* text = std::get_if<std::string>(&data);
  return is_null() || (text && *text == "auto");
}

std::string Value::text() const {
  return std::visit(Printer{}, data);
}

bool operator==(const Value& a, const Value& b) {
  return a.data == b.data;
}

std::string number_text(double value) {
  if (!std::isfinite(value)) {
    return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  }
  std::array<char, 64> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  std::string out(buffer.data(), end);
  return out.find_first_of(".e") == std::string::npos ? out + ".0" : out;
}

}  // namespace tessera::config

#include "tessera/config/convert.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/config/lookup.h"
#include "tessera/config/text.h"

namespace tessera::config {
namespace {

using Json = nlohmann::json;

std::optional<double> number_of(const Json& value) {
  if (value.is_number()) {
    return value.get<double>();
  }
  if (!value.is_string()) {
    return std::nullopt;
  }
  std::string text = lower(value.get<std::string>());
  const bool negative = text.starts_with('-');
  if (text == "infinity" || text == "-infinity" || text == "inf" || text == "-inf") {
    return negative ? -INFINITY : INFINITY;
  }
  double out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  const bool whole = error == std::errc() && end == text.data() + text.size() && !text.empty();
  return whole && std::isfinite(out) ? std::optional(out) : std::nullopt;
}

std::optional<int64_t> integer_of(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto big = value.get<uint64_t>();
    return big <= uint64_t(INT64_MAX) ? std::optional(int64_t(big)) : std::nullopt;
  }
  if (value.is_number_integer()) {
    return value.get<int64_t>();
  }
  const auto number = number_of(value);
  // 2^63 itself does not fit; 9.2e18 does.
  if (!number || *number != std::floor(*number) || std::abs(*number) >= 9223372036854775808.0) {
    return std::nullopt;
  }
  return int64_t(*number);
}

std::optional<bool> bool_of(const Json& value) {
  if (value.is_boolean()) {
    return value.get<bool>();
  }
  if (value.is_number() && (value == 0 || value == 1)) {
    return value == 1;
  }
  const std::string text = value.is_string() ? lower(value.get<std::string>()) : "";
  if (text == "true" || text == "false") {
    return text == "true";
  }
  return std::nullopt;
}

std::string shown(const Json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {  // JSON has no word for such numbers but null
    return std::isnan(value.get<double>()) ? "nan" : (value.get<double>() > 0 ? "inf" : "-inf");
  }
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= 80 ? text : text.substr(0, 77) + "...";
}

// Each overload returns whether the value was taken.
struct Setter {
  const Key& key;
  const Json& value;
  std::string& warning;

  template <class T, class U>
  static bool put(T* member, const std::optional<U>& got) {
    if (got) {
      *member = *got;
    }
    return got.has_value();
  }
  template <class T>
  static bool put(std::optional<T>* member, const std::optional<T>& got) {
    if (got) {
      *member = got;
    }
    return got.has_value();
  }
  bool operator()(bool* m) const { return put(m, bool_of(value)); }
  bool operator()(std::optional<bool>* m) const { return put(m, bool_of(value)); }
  bool operator()(int64_t* m) const { return put(m, integer_of(value)); }
  bool operator()(std::optional<int64_t>* m) const {
    if (key.limits.inf_unsets && number_of(value).value_or(0) == INFINITY) {
      m->reset();
      return true;
    }
    return put(m, integer_of(value));
  }
  bool operator()(double* m) const {
    if (value.is_boolean() && !key.limits.no_bool) {
      *m = value.get<bool>() ? 1.0 : 0.0;
      warning = shown(value) + " was read as the number " + number_text(*m);
      return true;
    }
    return put(m, number_of(value));
  }
  bool operator()(std::optional<double>* m) const {
    if (key.limits.takes_auto && value == "auto") {
      m->reset();
      return true;
    }
    double number = 0;
    if (!(*this)(&number)) {
      return false;
    }
    *m = number;
    return true;
  }
  bool operator()(std::string* m) const { return put(m, text()); }
  bool operator()(std::optional<std::string>* m) const { return put(m, text()); }
  bool operator()(std::vector<std::string>* m) const { return put(m, texts()); }
  bool operator()(std::optional<std::vector<std::string>>* m) const { return put(m, texts()); }
  bool operator()(c10::ScalarType* m) const { return put(m, dtype()); }
  bool operator()(std::optional<c10::ScalarType>* m) const { return put(m, dtype()); }
  bool operator()(std::vector<int64_t>* m) const {
    std::vector<int64_t> out;
    for (const Json& one : value.is_array() ? value : Json::array()) {
      const auto number = integer_of(one);
      if (!number) {
        return false;
      }
      out.push_back(*number);
    }
    *m = std::move(out);
    return value.is_array();
  }
  bool operator()(const EnumField& field) const {
    const std::string wanted = value.is_string() ? lower(value.get<std::string>()) : "";
    const auto found = std::find(field.names.begin(), field.names.end(), wanted);
    if (found == field.names.end()) {
      return false;
    }
    field.set(int(found - field.names.begin()));
    return true;
  }
  bool operator()(Value* m) const {
    if (!key.limits.null_only) {
      *m = to_value(value);
    }
    return !key.limits.null_only;
  }
  bool operator()(Params* m) const {
    if (!value.is_object()) {
      return false;
    }
    for (const auto& [name, one] : value.items()) {
      if (!one.is_string() || one != "auto") {
        (*m)[name] = to_value(one);
      }
    }
    return true;
  }

  std::optional<std::string> text() const {
    if (!value.is_string()) {
      return std::nullopt;
    }
    const auto out = value.get<std::string>();
    return key.limits.choices.empty() ? out : lower(out);
  }
  std::optional<c10::ScalarType> dtype() const {
    return value.is_string() ? dtype_of(value.get<std::string>()) : std::nullopt;
  }
  std::optional<std::vector<std::string>> texts() const {
    if (value.is_string() && key.limits.one_is_list) {
      return std::vector<std::string>{value.get<std::string>()};
    }
    if (!value.is_array()) {
      return std::nullopt;
    }
    std::vector<std::string> out;
    for (const Json& one : value) {
      if (!one.is_string()) {
        return std::nullopt;
      }
      const auto text = one.get<std::string>();
      if (std::find(out.begin(), out.end(), text) == out.end()) {
        out.push_back(text);
      }
    }
    return out;
  }
};

}  // namespace

bool is_unset(const Json& value) {
  return value.is_null() || (value.is_string() && value == "auto");
}

bool is_unset(const Key& key, const Json& value) {
  return is_unset(value) && !(key.limits.takes_auto && value.is_string());
}

Value to_value(const Json& value) {
  switch (value.type()) {
    case Json::value_t::boolean:
      return value.get<bool>();
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      if (const auto number = integer_of(value)) {
        return *number;
      }
      return value.get<double>();
    case Json::value_t::number_float:
      return value.get<double>();
    case Json::value_t::string:
      return value.get<std::string>();
    case Json::value_t::array: {
      List out;
      for (const Json& one : value) {
        out.push_back(to_value(one));
      }
      return out;
    }
    case Json::value_t::object: {
      Params out;
      for (const auto& [name, one] : value.items()) {
        out[name] = to_value(one);
      }
      return out;
    }
    default:
      return {};
  }
}

std::string assign(const Key& key, const Field& field, const Json& value, std::string& warning) {
  if (std::visit(Setter{key, value, warning}, field)) {
    return "";
  }
  const bool whole = std::holds_alternative<int64_t*>(field) || std::holds_alternative<std::optional<int64_t>*>(field);
  const double number = number_of(value).value_or(0);
  const bool too_large = whole && number >= 9223372036854775808.0 && std::isfinite(number);
  return "must be " + allowed(key) + ", got " + shown(value) + (too_large ? ", which is too large: below 2^63" : "");
}

}  // namespace tessera::config

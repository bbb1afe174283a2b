#include "json_values.h"

#include "tessera/base/error.h"
#include "tessera/config/text.h"

namespace tessera::python {
namespace {

constexpr int kDeepest = 64;

py::object class_of(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

// Reads an integer as a JSON parser does: one too large for an integer of the core is a float, and refused where it may not be.
nlohmann::json integer(py::handle value) {
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0) return number;
  const double wide = PyLong_AsDouble(value.ptr());
  const bool too_large = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  TESSERA_CHECK_VALUE(!too_large, "config", "an integer is too large for any key");
  return wide;
}

nlohmann::json at_depth(py::handle value, int depth) {
  TESSERA_CHECK_VALUE(depth <= kDeepest, "config", "nested deeper than ", kDeepest,
                      " levels; does a dict or list contain itself?");
  if (value.is_none()) return nullptr;
  if (py::isinstance(value, class_of("enum", "Enum"))) return at_depth(value.attr("value"), depth + 1);
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return integer(value);
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return utf8(py::reinterpret_borrow<py::str>(value));
  if (py::isinstance(value, class_of("collections.abc", "Mapping"))) {
    nlohmann::json object = nlohmann::json::object();
    for (const auto& item : py::list(value.attr("items")())) {
      const auto [key, member] = item.cast<std::pair<py::object, py::object>>();
      object[utf8(py::str(key))] = at_depth(member, depth + 1);
    }
    return object;
  }
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    nlohmann::json array = nlohmann::json::array();
    for (const auto& item : value)
      array.push_back(at_depth(item, depth + 1));
    return array;
  }
  if (py::isinstance(value, class_of("torch", "dtype"))) return py::str(value).cast<std::string>();
  if (py::isinstance(value, class_of("os", "PathLike"))) return utf8(py::str(class_of("os", "fspath")(value)));
  TESSERA_CHECK_VALUE(false, "config", "cannot read a value of type ", py::str(py::type::of(value)).cast<std::string>(),
                      "; use numbers, text, booleans, None, lists and dictionaries");
}

}  // namespace

std::string utf8(const py::str& text) {
  Py_ssize_t size = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data != nullptr) return {data, static_cast<size_t>(size)};
  PyErr_Clear();
  TESSERA_CHECK_VALUE(false, "config", "text that is no Unicode (a lone surrogate): ",
                      config::whole_characters(py::repr(text).cast<std::string>().substr(0, 200)));
}

nlohmann::json to_json(py::handle value) {
  return at_depth(value, 0);
}

py::object to_python(const config::Params& params) {
  py::dict result;
  for (const auto& [key, item] : params)
    result[py::str(key)] = to_python(item);
  return result;
}

py::object to_python(const config::Value& value) {
  return std::visit(
      [](const auto& item) -> py::object {
        using T = std::decay_t<decltype(item)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return py::none();
        } else if constexpr (std::is_same_v<T, config::Params>) {
          return to_python(item);
        } else if constexpr (std::is_same_v<T, config::List>) {
          py::list result;
          for (const auto& member : item)
            result.append(to_python(member));
          return result;
        } else {
          return py::cast(item);
        }
      },
      value.data);
}

}  // namespace tessera::python

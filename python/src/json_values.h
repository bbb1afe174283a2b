// Values of a configuration between Python and the core.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bindings.h"
#include "tessera/config/value.h"

namespace tessera::python {

// What programs put into a configuration, as JSON: None, booleans, numbers, text, any mapping, lists and tuples; a torch.dtype, an
// enum by its value and a path as their text. Value error for other types, text that is no Unicode, an integer that no
// number holds, and more than 64 levels.
nlohmann::json to_json(py::handle value);
// The text as UTF-8; value error where it is no Unicode.
std::string utf8(const py::str& text);

py::object to_python(const config::Value& value);
py::object to_python(const config::Params& params);

}  // namespace tessera::python

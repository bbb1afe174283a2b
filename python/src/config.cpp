#include "tessera/config/config.h"

#include <pybind11/stl.h>

#include <nlohmann/json.hpp>

#include "bindings.h"
#include "tessera/base/error.h"
#include "tessera/config/json.h"
#include "tessera/config/json_text.h"
#include "tessera/config/precision.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"

namespace tessera::python {
namespace {

using namespace config;

nlohmann::json to_json(py::handle value) {
  if (value.is_none()) return nullptr;
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) {
    // As a JSON parser does: what an integer of the core cannot hold is a float, and refused where it has to be one.
    int overflow = 0;
    const int64_t integer = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    return overflow == 0 ? nlohmann::json(integer) : nlohmann::json(value.cast<double>());
  }
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (py::isinstance<py::dict>(value)) {
    nlohmann::json object = nlohmann::json::object();
    for (const auto& [key, item] : value.cast<py::dict>())
      object[py::str(key).cast<std::string>()] = to_json(item);
    return object;
  }
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    nlohmann::json array = nlohmann::json::array();
    for (const auto& item : value)
      array.push_back(to_json(item));
    return array;
  }
  TESSERA_CHECK_VALUE(false, "config", "cannot read a value of type ", py::str(py::type::of(value)).cast<std::string>(),
                      "; use numbers, text, booleans, None, lists and dictionaries");
}

py::object to_python(const Value& value);

py::object to_python(const Params& params) {
  py::dict result;
  for (const auto& [key, item] : params)
    result[py::str(key)] = to_python(item);
  return result;
}

py::object to_python(const List& list) {
  py::list result;
  for (const auto& item : list)
    result.append(to_python(item));
  return result;
}

py::object to_python(const Value& value) {
  return std::visit(
      [](const auto& item) -> py::object {
        using T = std::decay_t<decltype(item)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return py::none();
        } else if constexpr (std::is_same_v<T, List> || std::is_same_v<T, Params>) {
          return to_python(item);
        } else {
          return py::cast(item);
        }
      },
      value.data);
}

void bind_tree(py::module_& m) {
  py::class_<Batch>(m, "Batch")
      .def_readonly("train_batch_size", &Batch::train_batch_size)
      .def_readonly("micro_batch_size", &Batch::micro_batch_size)
      .def_readonly("gradient_accumulation_steps", &Batch::gradient_accumulation_steps);
  py::class_<Config>(m, "Config")
      .def_static("from_file", &Config::from_file, py::arg("path"))
      .def_static("from_json", &Config::from_json, py::arg("text"))
      .def_static(
          "from_dict", [](const py::dict& value) { return from_value(to_json(value)); }, py::arg("value"))
      .def(
          "get", [](const Config& config, const std::string& path) { return to_python(config.get(path)); },
          py::arg("path"))
      .def("to_dict", [](const Config& config) { return to_python(config.to_dict()); })
      .def_property_readonly("placements", &placements)
      .def("resolve_batch", &Config::resolve_batch, py::arg("data_parallel_size"))
      .def(
          "with_batch",
          [](Config config, int64_t train_batch_size, int64_t micro_batch_size) {
            config.train_batch_size = train_batch_size;
            config.train_micro_batch_size_per_gpu = micro_batch_size;
            config.gradient_accumulation_steps.reset();
            config.elasticity.ignore_non_elastic_batch_info = true;  // its own batch is no contradiction
            return config;
          },
          py::arg("train_batch_size"), py::arg("micro_batch_size"))
      .def("describe", &Config::describe, py::arg("all") = true)
      .def_readonly("warnings", &Config::warnings)
      .def_readonly("given", &Config::given);
}

}  // namespace

void bind_config(py::module_& m) {
  bind_tree(m);
  // JSON that json.loads() reads, from JSON as people write it.
  m.def(
      "strict_json", [](const std::string& text) { return strict_json(text, /*quote_words=*/false); }, py::arg("text"));
  m.def("check_served", &check_served, py::arg("config"));
  m.def("precision", &precision, py::arg("config"));
  m.def("optimizer_kind", &optimizer_kind, py::arg("config"));
}

}  // namespace tessera::python

#include "tessera/config/config.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.h"
#include "json_values.h"
#include "tessera/config/elastic.h"
#include "tessera/config/json.h"
#include "tessera/config/json_text.h"
#include "tessera/config/lookup.h"
#include "tessera/config/params.h"
#include "tessera/config/precision.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"

namespace tessera::python {
namespace {

using namespace config;

// The type of a key in Python: dtypes are torch's, enums are texts.
struct TypeOf {
  const Limits& limits;
  std::string operator()(const bool*) const { return "bool"; }
  std::string operator()(const int64_t*) const { return "int"; }
  std::string operator()(const double*) const { return "float"; }
  std::string operator()(const std::string*) const { return "str"; }
  std::string operator()(const c10::ScalarType*) const { return "torch.dtype"; }
  std::string operator()(const EnumField&) const { return "str"; }
  std::string operator()(const Value*) const { return "Any"; }
  std::string operator()(const Params*) const { return "dict[str, Any]"; }
  template <class T>
  std::string operator()(const std::vector<T>*) const {
    return "list[" + (*this)(static_cast<T*>(nullptr)) + "]";
  }
  template <class T>
  std::string operator()(const std::optional<T>*) const {
    return (*this)(static_cast<T*>(nullptr)) + (limits.takes_auto ? " | Literal[\"auto\"]" : " | None");
  }
};

// Path and type of every key that has an effect, in the order of the table.
std::vector<std::pair<std::string, std::string>> key_types() {
  std::vector<std::pair<std::string, std::string>> types;
  Config unused;
  for (const Key& key : keys())
    if (has_effect(key)) types.emplace_back(key.path, std::visit(TypeOf{key.limits}, key.field(unused)));
  return types;
}

// The Python value of a dtype; null for all other members.
struct DtypeIn {
  py::object operator()(c10::ScalarType* dtype) const { return py::cast(*dtype); }
  py::object operator()(std::optional<c10::ScalarType>* dtype) const { return py::cast(*dtype); }
  template <class T>
  py::object operator()(const T&) const {
    return {};
  }
};

py::object value_in(const Config& config, const Key& key) {
  const py::object dtype = std::visit(DtypeIn{}, key.field(const_cast<Config&>(config)));
  return dtype ? dtype : to_python(value_of(key, config));
}

// An object of the configuration; its keys and objects are attributes.
struct Section {
  py::object config;
  std::string path;  // "" is the whole
};

std::string child(const Section& section, const std::string& name) {
  return section.path.empty() ? name : section.path + "." + name;
}

// Attributes of a section, in order.
std::vector<std::string> attributes_of(const Section& section) {
  std::vector<std::string> names;
  for (const auto& [path, type] : key_types()) {
    const std::string start = section.path.empty() ? "" : section.path + ".";
    if (!path.starts_with(start)) continue;
    std::string name = path.substr(start.size(), path.find('.', start.size()) - start.size());
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

py::object attribute(const Section& section, const std::string& name) {
  const std::string path = child(section, name);
  if (const Key* const key = find_key(path)) {
    if (has_effect(*key)) return value_in(section.config.cast<const Config&>(), *key);
    throw py::attribute_error("[config] " + path + " has no effect in this version; get(\"" + path +
                              "\") has its value");
  }
  const auto names = attributes_of(section);
  if (std::find(names.begin(), names.end(), name) != names.end()) return py::cast(Section{section.config, path});
  const std::string meant = nearest(name, names);
  throw py::attribute_error("[config] there is no key " + path +
                            (meant.empty() ? "" : "; did you mean " + meant + "?"));
}

// The list of dir(): the object's own names, and the attributes.
py::list with_attributes(const py::object& object, const Section& section) {
  py::list names = py::module_::import("builtins").attr("object").attr("__dir__")(object);
  for (const std::string& name : attributes_of(section))
    names.append(name);
  return names;
}

void bind_tree(py::module_& m) {
  py::class_<Section>(m, "_Section")
      .def("__getattr__", &attribute)
      .def("__dir__", [](const py::object& object) { return with_attributes(object, object.cast<const Section&>()); })
      .def("__repr__", [](const Section& section) {
        py::dict members;
        for (const std::string& name : attributes_of(section))
          members[py::str(name)] = attribute(section, name);
        return section.path + " " + py::repr(members).cast<std::string>();
      });
  py::class_<Batch>(m, "Batch")
      .def_readonly("train_batch_size", &Batch::train_batch_size)
      .def_readonly("micro_batch_size", &Batch::micro_batch_size)
      .def_readonly("gradient_accumulation_steps", &Batch::gradient_accumulation_steps);
  py::class_<Config>(
      m, "Config",
      "A configuration: keys are attributes, config.zero_optimization.stage. Errors list all that is wrong.")
      .def_static("from_file", &Config::from_file, py::arg("path"),
                  "Of a file. IoError where it cannot be read, ConfigError.")
      .def_static(
          "from_json", [](const py::str& text) { return Config::from_json(utf8(text)); }, py::arg("text"),
          "Of a JSON text. ConfigError.")
      .def_static(
          "from_dict", [](const py::object& value) { return from_value(to_json(value)); }, py::arg("value"),
          "Of a dictionary. ConfigError.")
      .def("__getattr__",
           [](const py::object& config, const std::string& name) { return attribute({config, ""}, name); })
      .def("__dir__", [](const py::object& config) { return with_attributes(config, {config, ""}); })
      .def(
          "get", [](const Config& config, const std::string& path) { return to_python(config.get(path)); },
          py::arg("path"),
          "The value of a key by its path, \"zero_optimization.stage\"; of a section a dictionary. ConfigError.")
      .def(
          "to_dict", [](const Config& config, bool all) { return to_python(config.to_dict(all)); },
          py::arg("all") = true, "The whole tree; with all=False what was given.")
      .def_property_readonly("placements", &placements, "What the stage says of parameters, gradients and states.")
      .def("resolve_batch", &Config::resolve_batch, py::arg("data_parallel_size"),
           "The three batch sizes for that many ranks. ConfigError where they do not fit.")
      .def(
          "elastic_batch",
          [](const Config& config) {
            ElasticBatch batch = elastic_batch(config);
            return std::pair(batch.train_batch_size, std::move(batch.ranks));
          },
          "The batch that the section elasticity chooses, and the numbers of ranks that it fits.")
      .def("elastic_micro_batches", &elastic_micro_batches, py::arg("data_parallel_size"),
           "The micro-batches of that batch that fit so many ranks.")
      .def("describe", &Config::describe, py::arg("all") = true,
           "Every value as text, and whether it was given, a default or derived; with all=False what differs from the "
           "defaults.")
      .def_readonly("warnings", &Config::warnings, "What was read and has no effect, or another one, a line each.")
      .def_readonly("given", &Config::given, "Paths of the keys that were given.");
}

}  // namespace

void bind_config(py::module_& m) {
  bind_tree(m);
  // Makes JSON that json.loads() reads, from JSON as people write it.
  m.def(
      "strict_json", [](const std::string& text) { return strict_json(text, /*quote_words=*/false); }, py::arg("text"));
  m.def("check_without_optimizer", &config::check_without_optimizer, py::arg("config"));
  m.def("refuse_class", &config::refuse_class, py::arg("name"));
  m.def("refuse_rounding", &config::refuse_rounding, py::arg("name"));
  m.def("refuse_slices", &config::refuse_slices, py::arg("config"), py::arg("name"), py::arg("is_cut"));
  m.def("key_types", &key_types);
  m.def("optimizer_types", &optimizer_types);
  m.def("all_nearest", &all_nearest, py::arg("word"), py::arg("candidates"));
  m.def("check_served", &check_served, py::arg("config"));
  m.def("precision", &precision, py::arg("config"));
  m.def("optimizer_kind", &optimizer_kind, py::arg("config"));
  m.def("configured_optimizer", &native_optimizer, py::arg("config"));
}

}  // namespace tessera::python

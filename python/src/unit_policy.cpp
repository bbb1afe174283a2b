#include "tessera/engine/unit_policy.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "tessera/config/config.h"

namespace tessera::python {

void bind_unit_policy(py::module_& m) {
  using engine::Outline;
  py::class_<Outline>(m, "Outline")
      .def(py::init<>())
      .def(
          "add_module",
          [](Outline& outline, std::string path, std::vector<std::string> classes, bool repeats, bool runs) {
            outline.modules.push_back({std::move(path), std::move(classes), repeats, runs});
          },
          py::arg("path"), py::arg("classes"), py::arg("repeats"), py::arg("runs"))
      .def(
          "add_param",
          [](Outline& outline, std::string path, int64_t elements, int64_t identity) {
            outline.params.push_back({std::move(path), elements, identity});
          },
          py::arg("path"), py::arg("elements"), py::arg("identity"));
  m.def("default_units", &engine::default_units, py::arg("outline"));
  m.def("partition_units", &engine::partition_units, py::arg("outline"), py::arg("units"), py::arg("leaves"));
  py::enum_<engine::LeafBy>(m, "LeafBy")
      .value("Class", engine::LeafBy::Class)
      .value("Name", engine::LeafBy::Name)
      .value("Suffix", engine::LeafBy::Suffix);
  m.def("modules_matching", &engine::modules_matching, py::arg("outline"), py::arg("by"), py::arg("text"));
  m.def(
      "configured_leaves",
      [](const Outline& outline, const Config& config) {
        const engine::Leaves leaves = engine::configured_leaves(outline, config.zero_optimization);
        return std::pair(leaves.modules, leaves.warnings);
      },
      py::arg("outline"), py::arg("config"));
  m.def("outermost", &engine::outermost, py::arg("outline"), py::arg("modules"));
}

}  // namespace tessera::python

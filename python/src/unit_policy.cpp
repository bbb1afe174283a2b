#include "tessera/engine/unit_policy.h"

#include <pybind11/stl.h>

#include "bindings.h"

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
}

}  // namespace tessera::python

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "tessera/engine/flops_profile.h"

namespace tessera::python {

void bind_flops(py::module_& m) {
  using engine::FlopsProfile;
  using engine::ProfileRow;

  m.def("number_text", &engine::number_text, py::arg("value"), py::arg("unit"));
  py::class_<FlopsProfile>(m, "FlopsProfile")
      .def(py::init<double>(), py::arg("recompute"))
      .def_readwrite("recompute", &FlopsProfile::recompute)
      .def_property_readonly("started", &FlopsProfile::started)
      .def(
          "start",
          [](FlopsProfile& profile, const std::vector<std::tuple<std::string, std::string, int64_t>>& modules) {
            std::vector<ProfileRow> rows;
            for (const auto& [name, kind, parameters] : modules)
              rows.push_back({.name = name, .kind = kind, .parameters = parameters});
            profile.start(std::move(rows));
          },
          py::arg("modules"))
      .def("stop", &FlopsProfile::stop)
      .def("reset", &FlopsProfile::reset)
      // With what torch gives to a hook of a module.
      .def("enter", [](FlopsProfile& profile, int row, const py::args&) { profile.enter(row); })
      .def("leave", [](FlopsProfile& profile, int row, const py::args&) { profile.leave(row); })
      .def("rows",
           [](const FlopsProfile& profile) {
             std::vector<std::tuple<std::string, std::string, int64_t, int64_t, int64_t, double, bool>> rows;
             for (const ProfileRow& row : profile.rows())
               rows.emplace_back(row.name, row.kind, row.depth(), row.parameters, row.operations, row.seconds,
                                 row.timed);
             return rows;
           })
      .def_property_readonly("operations", &FlopsProfile::operations)
      .def_property_readonly("multiply_adds", &FlopsProfile::multiply_adds)
      .def_property_readonly("parameters", &FlopsProfile::parameters)
      .def_property_readonly("seconds", &FlopsProfile::seconds)
      .def(
          "text",
          [](const FlopsProfile& profile, int64_t step, int64_t depth, int64_t top_modules, bool detailed) {
            return profile.text({step, depth, top_modules, detailed});
          },
          py::arg("step"), py::arg("depth"), py::arg("top_modules"), py::arg("detailed"));
}

}  // namespace tessera::python

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <tuple>

#include "bindings.h"
#include "tessera/commands/commands.h"
#include "tessera/config/estimate.h"
#include "tessera/config/source.h"
#include "tessera/parallel/plan.h"

namespace tessera::python {

void bind_commands(py::module_& m) {
  using config::Estimate;
  using config::ModelSizes;
  py::class_<ModelSizes>(m, "ModelSizes");
  m.def("sizes_of", py::overload_cast<int64_t, const Config&>(&config::sizes_of), py::arg("count"), py::arg("config"));
  m.def(
      "sizes_of",
      [](const std::vector<std::tuple<std::string, std::string, int64_t, bool>>& params, const parallel::Plan* plan) {
        std::vector<config::SizedParam> sized;
        for (const auto& [name, unit, elements, trained] : params)
          sized.push_back({name, unit, elements, trained});
        return config::sizes_of(sized, plan);
      },
      py::arg("params"), py::arg("plan").none(true));
  py::class_<Estimate>(m, "Estimate", "Bytes of a rank, by kind, as the memory formula says them.")
      .def_readonly("stage", &Estimate::stage, "The ZeRO stage that they are for.")
      .def_readonly("params", &Estimate::params, "Of the parameters, on the device.")
      .def_readonly("grads", &Estimate::grads, "Of gradients, at the end of a backward.")
      .def_readonly("states", &Estimate::states, "Of master weights and optimizer states, on the device.")
      .def_readonly("gathered", &Estimate::gathered, "Of the two largest units, whole, in stage 3.")
      .def_readonly("host", &Estimate::host, "What lives in host memory.")
      .def_readonly("disk", &Estimate::disk, "What lives on a disk.")
      .def_property_readonly("total", &Estimate::total, "What is on the device.")
      .def("__repr__", [](const Estimate& e) {
        return c10::str("Estimate(stage=", e.stage, ", params=", e.params, ", grads=", e.grads, ", states=", e.states,
                        ", gathered=", e.gathered, ", host=", e.host, ", disk=", e.disk, ")");
      });
  m.def("estimate", py::overload_cast<const config::ModelSizes&, const Config&, int>(&config::estimate),
        py::arg("sizes"), py::arg("config"), py::arg("ranks"));
  m.def("with_stage", &config::with_stage, py::arg("config"), py::arg("stage"));
  m.def("json_of", &config::json_of, py::arg("given"));
  m.def("config_of", &config::config_of, py::arg("given"));
  m.def("shard_bytes", &commands::shard_bytes, py::arg("size"));

  m.def("command_names", [] {
    std::vector<std::pair<std::string, std::string>> found;
    for (auto& [command, summary] : commands::names())
      found.emplace_back(std::move(command), std::move(summary));
    return found;
  });
  m.def(
      "run_command",
      [](const std::vector<std::string>& arguments,
         std::function<ModelSizes(const std::string&, const Config&)> sizes_of,
         std::vector<std::pair<std::string, std::string>> facts) {
        const py::gil_scoped_release unlocked;
        auto result = commands::run(arguments, {std::move(sizes_of), std::move(facts)});
        return std::tuple(result.code, std::move(result.output), std::move(result.errors));
      },
      py::arg("arguments"), py::arg("sizes_of"), py::arg("facts"));
}

}  // namespace tessera::python

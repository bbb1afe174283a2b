#include "tessera/optim/schedule.h"

#include <pybind11/stl.h>

#include <type_traits>
#include <variant>

#include "bindings.h"
#include "json_values.h"
#include "tessera/config/convert.h"
#include "tessera/config/params.h"
#include "tessera/optim/advice.h"

namespace tessera::python {
namespace {

// The type with its options as attributes; made without arguments it has the defaults.
template <class Schedule>
void bind_kind(py::module_& m, const char* name) {
  py::class_<Schedule> bound(m, name);
  bound.def(py::init<>());
  for (const optim::ScheduleOption<Schedule>& option : optim::options_of<Schedule>())
    std::visit(
        [&]<class T>(T Schedule::* const& at) {
          if constexpr (std::is_enum_v<T>)
            bound.def_property_readonly(option.name, [at](const Schedule& options) {
              return optim::names_of(options.*at)[static_cast<size_t>(options.*at)];
            });
          else
            bound.def_readonly(option.name, at);
        },
        option.where);
}

}  // namespace

void bind_schedule(py::module_& m) {
  using namespace optim;
  bind_kind<WarmupLR>(m, "WarmupLR");
  bind_kind<WarmupDecayLR>(m, "WarmupDecayLR");
  bind_kind<WarmupCosineLR>(m, "WarmupCosineLR");
  bind_kind<OneCycle>(m, "OneCycle");
  bind_kind<LRRangeTest>(m, "LRRangeTest");
  m.def(
      "schedule_of",
      [](const std::string& type, const py::dict& arguments) {
        return config::schedule_of(type, std::get<config::Params>(config::to_value(to_json(arguments)).data));
      },
      py::arg("type"), py::arg("arguments"));
  m.def(
      "schedule_name",
      [](const std::string& type) {
        const auto found = find_schedule(type);
        return found ? std::string(name_of(*found)) : "";
      },
      py::arg("type"));
  m.def("warn_of_betas", &warn_of_betas, py::arg("schedule"), py::arg("has_betas"), py::arg("optimizer"));

  py::class_<ScheduleValues>(m, "ScheduleValues")
      .def_readonly("lr", &ScheduleValues::lr)
      .def_readonly("momentum", &ScheduleValues::momentum);
  m.def(
      "evaluate",
      [](const ScheduleOptions& options, int64_t iteration, const std::vector<double>& base_lrs) {
        return evaluate(options, iteration, base_lrs);
      },
      py::arg("options"), py::arg("iteration"), py::arg("base_lrs"));
}

}  // namespace tessera::python

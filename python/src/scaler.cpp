#include "tessera/amp/grad_scaler.h"

#include "bindings.h"

namespace tessera::python {

void bind_scaler(py::module_& m) {
  using amp::GradScaler;
  using amp::ScalerOptions;
  py::class_<ScalerOptions>(m, "ScalerOptions")
      .def(py::init<>())
      .def_static("off", &ScalerOptions::off)
      .def_static("fixed", &ScalerOptions::fixed, py::arg("scale"))
      .def_static("autocast", &ScalerOptions::autocast)
      .def_readwrite("dynamic", &ScalerOptions::dynamic)
      .def_readwrite("initial", &ScalerOptions::initial)
      .def_readwrite("factor", &ScalerOptions::factor)
      .def_readwrite("window", &ScalerOptions::window)
      .def_readwrite("hysteresis", &ScalerOptions::hysteresis)
      .def_readwrite("refill_on_good", &ScalerOptions::refill_on_good)
      .def_readwrite("minimum", &ScalerOptions::minimum)
      .def_readwrite("error_at_minimum", &ScalerOptions::error_at_minimum);

  py::class_<GradScaler::State>(m, "ScalerState")
      .def(py::init<>())
      .def_readwrite("scale", &GradScaler::State::scale)
      .def_readwrite("steps", &GradScaler::State::steps)
      .def_readwrite("good_steps", &GradScaler::State::good_steps)
      .def_readwrite("budget", &GradScaler::State::budget)
      .def_readwrite("overridden", &GradScaler::State::overridden);

  // Python has a copy: an engine changes its own through its calls.
  py::class_<GradScaler>(m, "GradScaler")
      .def("scale", &GradScaler::scale)
      .def("needed", &GradScaler::needed)
      .def("dynamic", &GradScaler::dynamic)
      .def("options", &GradScaler::options, py::return_value_policy::copy)
      .def("state", &GradScaler::state, py::return_value_policy::copy);
}

}  // namespace tessera::python

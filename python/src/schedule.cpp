#include "tessera/optim/schedule.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace tessera::python {

void bind_schedule(py::module_& m) {
  using namespace optim;

  py::enum_<WarmupType>(m, "WarmupType").value("Log", WarmupType::Log).value("Linear", WarmupType::Linear);

  py::class_<WarmupLR>(m, "WarmupLR")
      .def(py::init<>())
      .def_readwrite("warmup_min_lr", &WarmupLR::warmup_min_lr)
      .def_readwrite("warmup_max_lr", &WarmupLR::warmup_max_lr)
      .def_readwrite("warmup_num_steps", &WarmupLR::warmup_num_steps)
      .def_readwrite("warmup_type", &WarmupLR::warmup_type);

  py::class_<WarmupDecayLR>(m, "WarmupDecayLR")
      .def(py::init<>())
      .def_readwrite("total_num_steps", &WarmupDecayLR::total_num_steps)
      .def_readwrite("warmup_min_lr", &WarmupDecayLR::warmup_min_lr)
      .def_readwrite("warmup_max_lr", &WarmupDecayLR::warmup_max_lr)
      .def_readwrite("warmup_num_steps", &WarmupDecayLR::warmup_num_steps)
      .def_readwrite("warmup_type", &WarmupDecayLR::warmup_type);

  py::class_<WarmupCosineLR>(m, "WarmupCosineLR")
      .def(py::init<>())
      .def_readwrite("total_num_steps", &WarmupCosineLR::total_num_steps)
      .def_readwrite("warmup_min_ratio", &WarmupCosineLR::warmup_min_ratio)
      .def_readwrite("warmup_num_steps", &WarmupCosineLR::warmup_num_steps)
      .def_readwrite("cos_min_ratio", &WarmupCosineLR::cos_min_ratio)
      .def_readwrite("warmup_type", &WarmupCosineLR::warmup_type);

  py::class_<OneCycle>(m, "OneCycle")
      .def(py::init<>())
      .def_readwrite("cycle_min_lr", &OneCycle::cycle_min_lr)
      .def_readwrite("cycle_max_lr", &OneCycle::cycle_max_lr)
      .def_readwrite("decay_lr_rate", &OneCycle::decay_lr_rate)
      .def_readwrite("cycle_first_step_size", &OneCycle::cycle_first_step_size)
      .def_readwrite("cycle_second_step_size", &OneCycle::cycle_second_step_size)
      .def_readwrite("cycle_first_stair_count", &OneCycle::cycle_first_stair_count)
      .def_readwrite("cycle_second_stair_count", &OneCycle::cycle_second_stair_count)
      .def_readwrite("decay_step_size", &OneCycle::decay_step_size)
      .def_readwrite("cycle_momentum", &OneCycle::cycle_momentum)
      .def_readwrite("cycle_min_mom", &OneCycle::cycle_min_mom)
      .def_readwrite("cycle_max_mom", &OneCycle::cycle_max_mom)
      .def_readwrite("decay_mom_rate", &OneCycle::decay_mom_rate);

  py::class_<LRRangeTest>(m, "LRRangeTest")
      .def(py::init<>())
      .def_readwrite("lr_range_test_min_lr", &LRRangeTest::lr_range_test_min_lr)
      .def_readwrite("lr_range_test_step_size", &LRRangeTest::lr_range_test_step_size)
      .def_readwrite("lr_range_test_step_rate", &LRRangeTest::lr_range_test_step_rate)
      .def_readwrite("lr_range_test_staircase", &LRRangeTest::lr_range_test_staircase);

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

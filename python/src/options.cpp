#include "tessera/zero/options.h"
#include <pybind11/stl.h>

#include "bindings.h"
#include "tessera/amp/autocast.h"
#include "tessera/amp/precision.h"
#include "tessera/shard/placement.h"

namespace tessera::python {

void bind_options(py::module_& m) {
  using amp::PrecisionPolicy;
  py::enum_<amp::Master>(m, "Master")
      .value("Weight", amp::Master::Weight)
      .value("Fp32", amp::Master::Fp32)
      .value("Split", amp::Master::Split);
  py::enum_<kernels::Rounding>(m, "Rounding")
      .value("Nearest", kernels::Rounding::Nearest)
      .value("Stochastic", kernels::Rounding::Stochastic);
  py::class_<PrecisionPolicy>(m, "PrecisionPolicy")
      .def(py::init<>())
      .def_static("fp32", &PrecisionPolicy::fp32)
      .def_static("bf16", &PrecisionPolicy::bf16, py::arg("check_overflow") = true)
      .def_static("fp16", &PrecisionPolicy::fp16)
      .def_readwrite("param", &PrecisionPolicy::param)
      .def_readwrite("grad", &PrecisionPolicy::grad)
      .def_readwrite("master", &PrecisionPolicy::master)
      .def_readwrite("state", &PrecisionPolicy::state)
      .def_readwrite("rounding", &PrecisionPolicy::rounding)
      .def_readwrite("grad_rounding", &PrecisionPolicy::grad_rounding)
      .def_readwrite("skip_nonfinite", &PrecisionPolicy::skip_nonfinite)
      .def("master_is_param", &PrecisionPolicy::master_is_param)
      .def("bytes_per_parameter", &PrecisionPolicy::bytes_per_parameter);

  py::class_<amp::AutocastOptions>(m, "AutocastOptions")
      .def(py::init<>())
      .def_readwrite("enabled", &amp::AutocastOptions::enabled)
      .def_readwrite("dtype", &amp::AutocastOptions::dtype);

  using shard::StagePlacements;
  py::class_<StagePlacements>(m, "Placements")
      .def_property_readonly("shards_params", &StagePlacements::shards_params)
      .def_property_readonly("shards_grads", &StagePlacements::shards_grads)
      .def_property_readonly("shards_states", &StagePlacements::shards_states);

  py::class_<zero::Options>(m, "ZeroOptions")
      .def(py::init<>())
      .def_readwrite("stage", &zero::Options::stage)
      .def_readwrite("precision", &zero::Options::precision)
      .def_readwrite("reduce_bucket_size", &zero::Options::reduce_bucket_size)
      .def_readwrite("min_unit_elements", &zero::Options::min_unit_elements)
      .def_readwrite("share_params", &zero::Options::share_params)
      .def_readwrite("overlap", &zero::Options::overlap)
      .def_readwrite("average", &zero::Options::average)
      .def_readwrite("seed", &zero::Options::seed)
      .def_readwrite("communication", &zero::Options::communication)
      .def_readwrite("reduce_at_step", &zero::Options::reduce_at_step);
}

}  // namespace tessera::python

#include "tessera/zero/options.h"
#include <pybind11/stl.h>

#include "bindings.h"
#include "tessera/amp/autocast.h"
#include "tessera/amp/precision.h"
#include "tessera/shard/placement.h"

namespace tessera::python {

void bind_options(py::module_& m) {
  using amp::PrecisionPolicy;
  py::class_<PrecisionPolicy>(m, "PrecisionPolicy")
      .def_readonly("param", &PrecisionPolicy::param)
      .def_readonly("grad", &PrecisionPolicy::grad)
      .def("master_is_param", &PrecisionPolicy::master_is_param)
      .def("bytes_per_parameter", [](const PrecisionPolicy& policy) { return policy.bytes_per_parameter(); });
  py::class_<amp::AutocastOptions>(m, "AutocastOptions")
      .def_readonly("enabled", &amp::AutocastOptions::enabled)
      .def_readonly("dtype", &amp::AutocastOptions::dtype);

  using shard::StagePlacements;
  py::class_<StagePlacements>(m, "Placements")
      .def_property_readonly("shards_params", &StagePlacements::shards_params)
      .def_property_readonly("shards_grads", &StagePlacements::shards_grads)
      .def_property_readonly("shards_states", &StagePlacements::shards_states)
      .def_property_readonly("reduces_every_backward",
                             [](const StagePlacements& p) { return p.reduce_at == shard::ReduceAt::EveryBackward; });

  py::class_<zero::Options>(m, "ZeroOptions")
      .def_readonly("precision", &zero::Options::precision)
      .def_readonly("overlap", &zero::Options::overlap);
}

}  // namespace tessera::python

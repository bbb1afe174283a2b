#include "bindings.h"

#include <torch/version.h>

PYBIND11_MODULE(_core, m) {
  using namespace tessera::python;
  m.doc() = "Bindings of the Tessera core; use the package `tessera`.";
  m.attr("torch_version") = TORCH_VERSION;  // compiled against; tessera/__init__.py compares
  m.attr("version") = TESSERA_VERSION;
  // Types of torch.distributed must exist before ours mention them.
  py::module_::import("torch");
  bind_comm(m);
  bind_options(m);
  bind_scaler(m);
  bind_optimizer(m);
  bind_schedule(m);
  bind_config(m);
  bind_engine(m);
}

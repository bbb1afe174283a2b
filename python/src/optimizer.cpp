#include "tessera/optim/optimizer.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "tessera/optim/tensors.h"

namespace tessera::python {

void bind_optimizer(py::module_& m) {
  using namespace optim;

  py::enum_<Rule>(m, "Rule")
      .value("Adam", Rule::Adam)
      .value("Sgd", Rule::Sgd)
      .value("Lion", Rule::Lion)
      .value("Adagrad", Rule::Adagrad)
      .value("External", Rule::External);

  py::class_<GroupOptions>(m, "GroupOptions")
      .def(py::init<>())
      .def_readwrite("lr", &GroupOptions::lr)
      .def_readwrite("beta1", &GroupOptions::beta1)
      .def_readwrite("beta2", &GroupOptions::beta2)
      .def_readwrite("eps", &GroupOptions::eps)
      .def_readwrite("weight_decay", &GroupOptions::weight_decay)
      .def_readwrite("decoupled", &GroupOptions::decoupled)
      .def_readwrite("bias_correction", &GroupOptions::bias_correction)
      .def_readwrite("momentum", &GroupOptions::momentum)
      .def_readwrite("dampening", &GroupOptions::dampening)
      .def_readwrite("nesterov", &GroupOptions::nesterov)
      .def_readwrite("lr_decay", &GroupOptions::lr_decay)
      .def_readwrite("initial_accumulator_value", &GroupOptions::initial_accumulator_value)
      .def_readwrite("maximize", &GroupOptions::maximize);

  py::class_<OptimizerOptions>(m, "OptimizerOptions")
      .def(py::init<>())
      .def_readwrite("rule", &OptimizerOptions::rule)
      .def_readwrite("defaults", &OptimizerOptions::defaults);
  m.def("native_types", &native_types);
  m.def(
      "state_names",
      [](Rule rule, const std::vector<GroupOptions>& groups) {
        const StateNames names = state_names(rule, groups);
        return std::vector<std::string>(names.name.begin(), names.name.begin() + names.count);
      },
      py::arg("rule"), py::arg("groups"));
  m.def(
      "update_tensors",
      [](Rule rule, const GroupOptions& group, std::vector<at::Tensor> params, std::vector<at::Tensor> grads,
         std::vector<std::vector<at::Tensor>> states, std::vector<at::Tensor> steps, std::vector<uint64_t> firsts,
         bool stochastic, uint64_t seed) {
        py::gil_scoped_release no_gil;
        std::vector<TensorUpdate> tensors(params.size());
        for (size_t k = 0; k < params.size(); ++k) {
          tensors[k] = {params[k], grads.at(k), {}, steps.at(k).item<int64_t>() + 1, firsts.at(k)};
          for (size_t s = 0; s < states.size(); ++s)
            tensors[k].state.at(s) = states[s].at(k);
        }
        update_tensors(rule, group, tensors, stochastic ? kernels::Rounding::Stochastic : kernels::Rounding::Nearest,
                       seed);
        for (at::Tensor& step : steps)
          step.add_(1);
      },
      py::arg("rule"), py::arg("group"), py::arg("params"), py::arg("grads"), py::arg("states"), py::arg("steps"),
      py::arg("firsts"), py::arg("stochastic") = false, py::arg("seed") = 0);
}

}  // namespace tessera::python

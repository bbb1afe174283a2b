#include "tessera/optim/optimizer.h"

#include <pybind11/stl.h>

#include <optional>
#include <type_traits>
#include <variant>

#include "bindings.h"
#include "tessera/base/error.h"
#include "tessera/engine/whole_shards.h"
#include "tessera/optim/tensors.h"
#include "tessera/optim/whole.h"

namespace tessera::python {
namespace {

using optim::Field;
using optim::GroupOptions;

// A group's values by the names that param groups of torch have.
py::dict group_values(optim::Rule rule, const GroupOptions& group) {
  py::dict values;
  for (const Field& field : optim::type_of(rule).fields) {
    std::visit(
        [&]<class T>(const T& at) {
          if constexpr (std::is_same_v<T, Field::Pair>) {
            const double first = group.*at.first;
            const bool is_none = at.first_may_be_none && first == optim::kOfDtype;
            values[field.name] =
                py::make_tuple(is_none ? py::object(py::none()) : py::object(py::float_(first)), group.*at.second);
          } else
            values[field.name] = group.*at;
        },
        field.where);
  }
  return values;
}

// Takes what a param group has of the rule's hyper-parameters.
void read_group(optim::Rule rule, const py::dict& values, GroupOptions& group) {
  for (const Field& field : optim::type_of(rule).fields) {
    if (!values.contains(field.name)) continue;
    const py::object value = values[field.name];
    std::visit(
        [&]<class T>(const T& at) {
          if constexpr (std::is_same_v<T, Field::Pair>) {
            const py::sequence pair = value;
            TESSERA_CHECK_VALUE(pair.size() == 2, "optim", field.name, " must be two numbers, got ", pair.size());
            const py::object first = pair[0];
            const bool is_none = at.first_may_be_none && first.is_none();
            group.*at.first = is_none ? optim::kOfDtype : py::float_(first).cast<double>();
            group.*at.second = py::float_(pair[1]).cast<double>();
          } else if constexpr (std::is_same_v<T, double GroupOptions::*>) {
            group.*at = py::float_(value).cast<double>();  // also takes a tensor of one element
          } else if constexpr (std::is_same_v<T, bool GroupOptions::*>) {
            group.*at = py::bool_(value).cast<bool>();
          } else {
            group.*at = value.cast<int64_t>();
          }
        },
        field.where);
  }
}

void update_whole(optim::Rule rule, const std::vector<GroupOptions>& groups, const std::vector<size_t>& group_of,
                  std::vector<at::Tensor> params, std::vector<at::Tensor> grads,
                  std::vector<std::vector<at::Tensor>> states, const std::vector<int64_t>& steps,
                  const std::vector<int>& numbers, const optim::ShardsPtr& shards) {
  const py::gil_scoped_release no_gil;
  std::vector<optim::WholeUpdate> updates;
  for (size_t i = 0; i < params.size(); ++i) {
    updates.push_back({&groups.at(group_of.at(i)), numbers.at(i), params[i], grads.at(i), steps.at(i)});
    for (size_t s = 0; s < states.at(i).size(); ++s)
      updates.back().state.at(s) = states[i][s];
  }
  optim::update_whole(rule, updates, shards != nullptr ? *shards : *optim::whole_parameters());
}

void bind_whole(py::module_& m) {
  using namespace optim;
  py::class_<Shards, ShardsPtr>(m, "Shards")
      .def(
          "sizes",
          [](const Shards& shards, int param, const at::Tensor& part) { return shards.sizes(param, part).vec(); },
          py::arg("param"), py::arg("part"));
  m.def(
      "whole_states",
      [](Rule rule, const GroupOptions& group, const std::vector<int64_t>& sizes) {
        std::vector<std::pair<std::string, std::optional<std::vector<int64_t>>>> states;
        for (const WholeState& state : whole_states(rule, group, sizes))
          states.emplace_back(state.name, state.sizes);
        return states;
      },
      py::arg("rule"), py::arg("group"), py::arg("sizes"));
  m.def("shards_of", &engine::shards_of, py::arg("engine"), py::arg("optimizer"), py::keep_alive<0, 1>());
  m.def("update_whole", &python::update_whole, py::arg("rule"), py::arg("groups"), py::arg("group_of"),
        py::arg("params"), py::arg("grads"), py::arg("states"), py::arg("steps"), py::arg("numbers"),
        py::arg("shards").none(true));
  m.def("wrong_param", &wrong_param, py::arg("rule"), py::arg("on_cpu_only"), py::arg("param"));
  m.def("orthogonal", &orthogonal, py::arg("matrix"), py::arg("steps"));
  m.def("is_muon_matrix", &is_muon_matrix, py::arg("name"), py::arg("dims"));
  m.def("group_values", &group_values, py::arg("rule"), py::arg("group"));
  m.def("read_group", &read_group, py::arg("rule"), py::arg("values"), py::arg("group"));
  m.def(
      "check_group",
      [](Rule rule, const GroupOptions& group, const std::string& origin, std::optional<size_t> number) {
        check(type_of(rule), group, origin, number);
      },
      py::arg("rule"), py::arg("group"), py::arg("origin"), py::arg("number") = py::none());
  m.def("torch_defaults", [](const std::string& type) { return find_torch_type(type)->defaults; }, py::arg("type"));
  m.def("options_of_type", &options_of_type, py::arg("type"), py::arg("adam_w_mode") = true);
}

}  // namespace

void bind_optimizer(py::module_& m) {
  using namespace optim;

  py::enum_<Rule>(m, "Rule")
      .value("Adam", Rule::Adam)
      .value("Sgd", Rule::Sgd)
      .value("Lion", Rule::Lion)
      .value("Adagrad", Rule::Adagrad)
      .value("External", Rule::External)
      .value("Lamb", Rule::Lamb)
      .value("Muon", Rule::Muon)
      .value("Adafactor", Rule::Adafactor);

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
      .def_readwrite("defaults", &OptimizerOptions::defaults)
      .def_readwrite("others", &OptimizerOptions::others);
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
  bind_whole(m);
}

}  // namespace tessera::python

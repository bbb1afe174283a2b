#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.h"
#include "tessera/base/error.h"
#include "tessera/pipeline/boxes.h"
#include "tessera/pipeline/partition.h"
#include "tessera/pipeline/schedule.h"

namespace tessera::python {

namespace {

pipeline::Kind kind_of(const std::string& name) {
  for (const auto kind : {pipeline::Kind::ReceiveActivations, pipeline::Kind::Forward, pipeline::Kind::SendActivations,
                          pipeline::Kind::ReceiveGradients, pipeline::Kind::Backward, pipeline::Kind::SendGradients})
    if (name == pipeline::kind_name(kind)) return kind;
  TESSERA_CHECK_VALUE(false, "pipeline", "there is no kind of action '", name, "'");
}

// From the dataclasses of python/tessera/hybrid/_layout.py, which actors pickle.
pipeline::Layout layout_from(const py::object& layout) {
  return {layout.attr("batch").cast<int>(), layout.attr("sequence").cast<int>(), layout.attr("replicas").cast<int>()};
}

pipeline::Dims dims_from(const py::object& dims) {
  return {dims.attr("batch").cast<int>(), dims.attr("sequence").cast<std::optional<int>>()};
}

void bind_boxes(py::module_& m) {
  using namespace pipeline;
  m.def(
      "whole_boxes",
      [](const py::object& layout, const py::object& dims, const std::vector<Sizes>& shapes, const std::string& where) {
        WholeTensor whole = whole_of(layout_from(layout), dims_from(dims), shapes, where);
        return std::pair(std::move(whole.sizes), std::move(whole.held));
      },
      py::arg("layout"), py::arg("dims"), py::arg("shapes"), py::arg("where"));
  m.def(
      "wanted_boxes",
      [](const py::object& layout, const py::object& dims, const Sizes& whole, const std::optional<Sizes>& samples,
         const std::string& where) { return wanted_of(layout_from(layout), dims_from(dims), whole, samples, where); },
      py::arg("layout"), py::arg("dims"), py::arg("whole"), py::arg("samples"), py::arg("where"));
  m.def("route", &route, py::arg("held"), py::arg("part"), py::arg("wanted"));
}

}  // namespace

void bind_pipeline(py::module_& m) {
  using namespace pipeline;

  const auto kind = [](const Action& a) { return std::string(kind_name(a.kind)); };
  py::class_<Action>(m, "StageAction")
      .def(py::init([](const std::string& kind, int micro, int chunk) { return Action{kind_of(kind), micro, chunk}; }),
           py::arg("kind"), py::arg("micro"), py::arg("chunk") = 0)
      .def_property_readonly("kind", kind)
      .def_readonly("micro", &Action::micro)
      .def_readonly("chunk", &Action::chunk)
      .def(py::self == py::self)
      .def("__hash__", [kind](const Action& a) { return py::hash(py::make_tuple(kind(a), a.micro, a.chunk)); })
      .def("__repr__", [kind](const Action& a) {
        return c10::str("Action(kind='", kind(a), "', micro=", a.micro, ", chunk=", a.chunk, ")");
      });

  py::class_<Shape>(m, "PipelineShape")
      .def(py::init<int, int, int>(), py::arg("stages"), py::arg("micro_batches"), py::arg("chunks") = 1)
      .def_readonly("stages", &Shape::stages)
      .def_readonly("micro_batches", &Shape::micro_batches)
      .def_readonly("chunks", &Shape::chunks)
      .def("is_first", &Shape::is_first, py::arg("stage"), py::arg("chunk"))
      .def("is_last", &Shape::is_last, py::arg("stage"), py::arg("chunk"))
      .def(py::self == py::self);

  m.def("pipeline_schedules", &schedules);
  m.def("training_table", &training, py::arg("name"), py::arg("shape"), py::arg("stage"));
  m.def("forward_table", &forward_only, py::arg("shape"), py::arg("stage"));
  m.def("live_bound", &live_bound, py::arg("name"), py::arg("shape"), py::arg("stage"));
  m.def("split_weights", &split, py::arg("weights"), py::arg("parts"));
  bind_boxes(m);
}

}  // namespace tessera::python

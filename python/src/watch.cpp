#include "tessera/engine/watch.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "tessera/base/caught_warnings.h"
#include "tessera/engine/notices.h"
#include "tessera/io/metrics.h"

namespace tessera::python {
namespace {

using Event = std::tuple<std::string, double, int64_t>;

struct Catcher {
  std::vector<std::string> stop() {
    const auto ended = std::exchange(caught, nullptr);
    return ended == nullptr ? std::vector<std::string>() : ended->texts();
  }
  std::unique_ptr<CaughtWarnings> caught = std::make_unique<CaughtWarnings>(false);
};

struct Forward {
  engine::Watch& watch;
  bool trains;
  std::optional<engine::Watch::Forward> now;
};

// Texts of momenta, each a number or several; what is no number as Python writes it.
std::vector<std::string> texts_of(const py::list& momenta) {
  std::vector<std::string> texts;
  for (const py::handle& momentum : momenta) {
    try {
      const bool several = py::isinstance<py::tuple>(momentum) || py::isinstance<py::list>(momentum);
      std::vector<double> values;
      for (const py::handle& value : several ? py::tuple(momentum.cast<py::sequence>()) : py::make_tuple(momentum))
        values.push_back(py::float_(py::reinterpret_borrow<py::object>(value)).cast<double>());
      texts.push_back(engine::momentum_text(values));
    } catch (const py::error_already_set&) {
      texts.push_back(py::repr(momentum).cast<std::string>());
    }
  }
  return texts;
}

py::dict row_of(const engine::CallRow& row) {
  const comm::CallTimes& total = row.total;
  const double ms = total.seconds * 1e3;
  py::dict found;
  found["op"] = total.op;
  found["bytes"] = total.bytes;
  found["ranks"] = total.ranks;
  found["calls"] = total.calls;
  found["total_ms"] = ms;
  found["average_ms"] = ms / static_cast<double>(total.calls);
  found["algbw_gbps"] = total.algorithm_bandwidth() * 8e-9;
  found["busbw_gbps"] = total.bus_bandwidth() * 8e-9;
  if (row.straggler_seconds) found["straggler_ms"] = *row.straggler_seconds * 1e3;
  return found;
}

py::dict seconds_of(const engine::Watch& watch) {
  py::dict seconds;
  if (!watch.step_seconds()) return seconds;
  for (const Phase phase : kPhases)
    seconds[phase_name(phase)] = (*watch.step_seconds())[static_cast<size_t>(phase)];
  return seconds;
}

std::vector<io::Metric> metrics_of(const std::vector<Event>& events) {
  std::vector<io::Metric> metrics;
  for (const auto& [name, value, step] : events)
    metrics.push_back({name, value, step});
  return metrics;
}

}  // namespace

void bind_watch(py::module_& m) {
  using engine::Watch;
  using io::MetricWriter;

  py::class_<MetricWriter>(m, "MetricWriter")
      .def(
          "write",
          [](MetricWriter& writer, const std::vector<Event>& events) {
            const py::gil_scoped_release no_gil;
            writer.write(metrics_of(events));
          },
          py::arg("events"))
      .def("warn", &MetricWriter::warn, py::arg("text"), py::arg("step"));
  m.def(
      "check_metrics", [](const std::vector<Event>& events) { io::check_metrics(metrics_of(events)); },
      py::arg("events"));
  m.def("csv_metrics", &io::csv_metrics, py::arg("folder"));
  m.def("tensorboard_metrics", &io::tensorboard_metrics, py::arg("folder"));
  m.def("json_metrics", &io::json_metrics, py::arg("path"));
  m.def("missing_numbers", &io::missing_numbers, py::arg("error"));
  m.attr("WITHOUT_AUTOCAST") = engine::kWithoutAutocast;
  m.def("metrics_folder", &io::metrics_folder, py::arg("output_path"), py::arg("job_name"), py::arg("standard"));

  py::class_<Forward>(m, "WatchedForward")
      .def("__enter__", [](Forward& forward) { forward.now.emplace(forward.watch, forward.trains); })
      .def("__exit__", [](Forward& forward, const py::args&) { forward.now.reset(); });
  // Catches warnings of the thread that makes it, until stop().
  py::class_<Catcher>(m, "CaughtWarnings").def(py::init<>()).def("stop", &Catcher::stop);
  m.def("warn", [](const std::string& text) { TORCH_WARN(text); }, py::arg("text"));

  py::class_<Watch>(m, "Watch")
      .def(py::init<const config::Config&>(), py::arg("config"))
      .def_property_readonly("calls", &Watch::calls)
      .def_property_readonly("step_seconds", &seconds_of)
      .def(
          "stepped",
          [](Watch& watch, engine::Engine& core, const std::vector<double>& rates, const py::list& momenta) {
            const Watch::Report report = watch.stepped(core, rates, texts_of(momenta));
            std::vector<Event> events;
            for (const io::Metric& metric : report.metrics)
              events.emplace_back(metric.name, metric.value, metric.step);
            return std::tuple(std::move(events), report.lines, report.progress, report.warnings);
          },
          py::arg("core"), py::arg("rates"), py::arg("momenta"))
      .def(
          "first_lines",
          [](const Watch& watch, engine::Engine& core, const std::vector<std::pair<size_t, std::string>>& groups) {
            std::vector<Watch::ParamGroup> shown;
            for (const auto& [parameters, values] : groups)
              shown.push_back({parameters, values});
            return watch.first_lines(core, shown);
          },
          py::arg("core"), py::arg("groups"))
      .def("attach", &Watch::attach, py::arg("core"), py::arg("speaks"))
      .def("listen", &Watch::listen, py::arg("core"))
      .def("wants_rates", &Watch::wants_rates, py::arg("core"))
      .def("memory", &Watch::memory, py::arg("core"))
      .def("expect", &Watch::expect, py::arg("steps"), py::arg("tokens_per_sample"))
      .def("count_flops", &Watch::count_flops, py::arg("core"), py::arg("per_sample"), py::arg("peak"))
      .def("count_flops_of_step", &Watch::count_flops_of_step, py::arg("core"), py::arg("peak"))
      .def("profiles", &Watch::profiles, py::arg("core"), py::arg("training"))
      .def(
          "show_profile",
          [](const Watch& watch, const engine::Engine& core, const engine::FlopsProfile& profile) {
            const Watch::Shown shown = watch.show_profile(core, profile);
            return std::pair(shown.text, shown.warnings);
          },
          py::arg("core"), py::arg("profile"))
      .def(
          "around_forward",
          [](Watch& watch, bool trains) { return std::unique_ptr<Forward>(new Forward{watch, trains, {}}); },
          py::arg("trains"), py::keep_alive<0, 1>())
      .def_property(
          "in_place", [](Watch& watch) { return watch.line().in_place(); },
          [](Watch& watch, bool in_place) { watch.line().set_in_place(in_place); })
      .def(
          "show", [](Watch& watch, const std::string& text) { watch.line().show(text); }, py::arg("text"))
      .def("end_line", [](Watch& watch) { watch.line().end(); })
      .def(
          "call_rows",
          [](const Watch& watch, engine::Engine& core, bool stragglers) {
            std::vector<engine::CallRow> rows;
            {
              const py::gil_scoped_release no_gil;
              rows = watch.call_rows(core, stragglers);
            }
            std::vector<py::dict> found;
            for (const engine::CallRow& row : rows)
              found.push_back(row_of(row));
            return std::pair(std::move(found), engine::text_of(rows));
          },
          py::arg("core"), py::arg("stragglers"));
}

}  // namespace tessera::python

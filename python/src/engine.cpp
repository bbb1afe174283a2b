#include "tessera/engine/engine.h"
#include "tessera/engine/inputs.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "bindings.h"
#include "tessera/base/transforms.h"
#include "tessera/engine/build.h"
#include "tessera/engine/client_states.h"
#include "tessera/engine/logical.h"
#include "tessera/engine/notices.h"
#include "tessera/engine/watch.h"
#include "tessera/offload/states.h"
#include "tessera/shard/device.h"
#include "tessera/zero/early_params.h"

namespace tessera::python {

using NoGil = py::call_guard<py::gil_scoped_release>;
using engine::Engine;

namespace {

std::shared_ptr<Engine> make_engine(engine::Options options, comm::Mesh mesh, std::vector<engine::ParamSpec> params,
                                    const std::vector<optim::GroupOptions>& groups) {
  options.names = {.coalesce = "coalesce_grad_reduction", .clip_grad_norm = "clip_grad_norm_"};
  options.zero.reader_lock = [] { return std::make_shared<py::gil_scoped_acquire>(); };
  py::gil_scoped_release no_gil;
  auto engine = std::make_unique<Engine>(options, std::move(mesh), std::move(params), groups);
  return {engine.release(), Unlocked<Engine>()};
}

// Without the end of the last line, which print() adds.
std::string lines_of(std::string text) {
  while (text.ends_with('\n'))
    text.pop_back();
  return text;
}

// A tensor for Python, which is None where the core has no tensor.
std::optional<at::Tensor> optional_tensor(at::Tensor tensor) {
  if (!tensor.defined()) return std::nullopt;
  return tensor;
}

constexpr engine::Scaling& (Engine::*kScaling)() = &Engine::scaling;
constexpr zero::StateAccess& (Engine::*kStates)() = &Engine::states;

// Binds a method of one of the engine's parts as one of the engine itself: Python never holds a part, which ends with destroy().
template <class Part, class R, class... A>
auto on(Part& (Engine::*part)(), R (Part::*method)(A...)) {
  return [=](Engine& e, A... a) -> R { return ((e.*part)().*method)(std::forward<A>(a)...); };
}
template <class Get, class Part, class R, class... A>
auto on(Get part, R (Part::*method)(A...) const) {
  return [=](Engine& e, A... a) -> R { return ((e.*part)().*method)(std::forward<A>(a)...); };
}

void bind_structs(py::module_& m) {
  using namespace engine;
  py::class_<Options>(m, "EngineOptions")
      .def_readonly("zero", &Options::zero)
      .def_readwrite("rule", &Options::rule)
      .def_readonly("micro_batch_size", &Options::micro_batch_size)
      .def_readonly("gradient_accumulation_steps", &Options::gradient_accumulation_steps)
      .def_readwrite("client_optimizer", &Options::client_optimizer)
      .def_readonly("autocast", &Options::autocast);

  m.def(
      "nothing_trained",
      [](const std::vector<ParamSpec>& params) {
        const std::string warning = nothing_trained(params);
        return warning.empty() ? std::vector<std::string>() : std::vector{warning};
      },
      py::arg("params"));
  m.def("check_device", &shard::check_device, py::arg("device"), NoGil());
  m.def(
      "explain_inputs",
      [](const std::string& error, std::optional<at::ScalarType> dtype, at::Device device, bool autocasts,
         const std::vector<std::tuple<std::string, at::ScalarType, at::Device>>& inputs) {
        std::vector<Input> all;
        for (const auto& [place, of, where] : inputs)
          all.push_back({place, of, where});
        return explain_inputs(
            error, {dtype, device, autocasts}, all,
            {.dtypes = "torch.",
             .cast = "pass inputs through tessera.cast_inputs(engine, ...), or set engine.cast_forward_inputs = True",
             .device = "engine.device"});
      },
      py::arg("error"), py::arg("dtype"), py::arg("device"), py::arg("autocasts"), py::arg("inputs"));
  m.def("engine_options", &options_from, py::arg("config"), py::arg("data_parallel_size"));

  py::class_<ParamSpec>(m, "ParamSpec")
      .def(py::init([](std::string name, at::Tensor tensor, int group, std::string unit,
                       const std::shared_ptr<zero::EarlyParams>& early, int number, std::optional<at::ScalarType> comm,
                       comm::Axes varies, const std::optional<CutArgs>& cut, int joins) {
             ParamSpec spec{std::move(name), std::move(tensor), group, std::move(unit)};
             spec.joins = joins;
             spec.comm = comm;
             spec.varies = varies;
             if (cut) spec.cut = to_cut(*cut);
             if (early) spec.restore = [early, number] { early->restore(number); };
             return spec;
           }),
           py::arg("name"), py::arg("tensor"), py::arg("group"), py::arg("unit"), py::arg("early") = py::none(),
           py::arg("number") = -1, py::arg("comm") = py::none(), py::arg("varies") = comm::Axes{},
           py::arg("cut") = py::none(), py::arg("joins") = -1)
      .def_readonly("name", &ParamSpec::name)
      .def_readonly("tensor", &ParamSpec::tensor)
      .def_readonly("group", &ParamSpec::group)
      .def_readonly("unit", &ParamSpec::unit)
      .def_readonly("joins", &ParamSpec::joins)
      .def_readonly("comm", &ParamSpec::comm)
      .def_readonly("varies", &ParamSpec::varies)
      .def_property_readonly(
          "whole_sizes", [](const ParamSpec& s) { return s.cut != nullptr ? s.cut->sizes : s.tensor.sizes().vec(); });

  py::enum_<Quantity>(m, "Quantity")
      .value("Weight", Quantity::Weight)
      .value("Master", Quantity::Master)
      .value("Gradient", Quantity::Gradient)
      .value("State0", Quantity::State0)
      .value("State1", Quantity::State1);

  using shard::NamedShard;
  py::class_<NamedShard>(m, "NamedShard")
      .def_readonly("name", &NamedShard::name)
      .def_readonly("param", &NamedShard::param)
      .def_readonly("quantity", &NamedShard::quantity)
      .def_property_readonly("sizes", [](const NamedShard& s) { return s.form.sizes; })
      .def_property_readonly("strides", [](const NamedShard& s) { return s.form.strides; })
      .def_property_readonly("range", [](const NamedShard& s) { return std::pair(s.range.begin, s.range.end); })
      .def_property_readonly("dtype", [](const NamedShard& s) { return s.dtype; })
      .def_readonly("replica", &NamedShard::replica)
      .def_readonly("trained", &NamedShard::trained);

  using Plan = OffloadPlan;
  py::enum_<UpdatedBy>(m, "UpdatedBy")
      .value("Device", UpdatedBy::Device)
      .value("Through", UpdatedBy::Through)
      .value("Host", UpdatedBy::Host);
  py::class_<offload::Rates>(m, "Rates")
      .def_readonly("bus", &offload::Rates::bus)
      .def_readonly("host", &offload::Rates::host)
      .def_readonly("memory", &offload::Rates::memory)
      .def_readonly("device", &offload::Rates::device)
      .def_readonly("disk", &offload::Rates::disk);
  py::class_<Plan::Row>(m, "OffloadRow")
      .def_readonly("unit", &Plan::Row::unit)
      .def_readonly("elements", &Plan::Row::elements)
      .def_readonly("states", &Plan::Row::states)
      .def_readonly("by", &Plan::Row::by);
  py::class_<Plan>(m, "OffloadPlan")
      .def_readonly("ratio", &Plan::ratio)
      .def_readonly("device_share", &Plan::device_share)
      .def_readonly("rates", &Plan::rates)
      .def_readonly("milliseconds", &Plan::milliseconds)
      .def_readonly("bus", &Plan::bus)
      .def_readonly("host", &Plan::host)
      .def_readonly("memory", &Plan::memory)
      .def_readonly("device", &Plan::device)
      .def_readonly("disk", &Plan::disk)
      .def_readonly("in_backward", &Plan::in_backward)
      .def_readonly("runs_on", &Plan::runs_on)
      .def_readonly("units", &Plan::units)
      .def("step", &Plan::step, py::arg("forward"), py::arg("backward"), py::arg("micro_batches") = 1)
      .def("text", &Plan::text);

  py::class_<Engine::Memory>(m, "Memory", "Bytes that an engine holds on this rank, by kind.")
      .def_readonly("params", &Engine::Memory::params, "Bytes of parameters: whole ones, or slices of them.")
      .def_readonly("grads", &Engine::Memory::grads, "Bytes of gradients, accumulated ones too.")
      .def_readonly("master", &Engine::Memory::master, "Bytes of masters.")
      .def_readonly("states", &Engine::Memory::states, "Bytes of the optimizer's states.")
      .def_readonly("buckets", &Engine::Memory::buckets, "Bytes of buffers for gathers and reductions.")
      .def_readonly("peak_buckets", &Engine::Memory::peak_buckets, "The most that buckets ever were.")
      .def_readonly("host", &Engine::Memory::host,
                    "Of all but buckets, what lives in host memory and not on the device.")
      .def_readonly("disk", &Engine::Memory::disk, "Of all but buckets, what lives on a disk.")
      .def_readonly("shared", &Engine::Memory::shared,
                    "Bytes of parameters that all ranks of the host have together, once for all of them.")
      .def("__repr__", [](const Engine::Memory& memory) { return lines_of(engine::table_of(memory)); });
  py::class_<engine::MemoryUse, Engine::Memory>(m, "MemoryUse",
                                                "Memory beside what the formula says; printed as a table of MiB.")
      .def_readonly("formula", &engine::MemoryUse::formula, "The bytes that the memory formula says, by kind.")
      .def("__repr__", [](const engine::MemoryUse& memory) { return lines_of(c10::str(memory)); });
}

void bind_writes(py::module_& m) {
  py::enum_<zero::Writes>(m, "Writes")
      .value("None_", zero::Writes::None)
      .value("FromRank", zero::Writes::FromRank)
      .value("Own", zero::Writes::Own);
}

void bind_residences(py::module_& m) {
  py::enum_<shard::Residence>(m, "Residence")
      .value("Device", shard::Residence::Device)
      .value("Host", shard::Residence::Host)
      .value("Nvme", shard::Residence::Nvme);
  py::enum_<zero::StateKind>(m, "StateKind")
      .value("OptimizerStates", zero::StateKind::OptimizerStates)
      .value("Masters", zero::StateKind::Masters)
      .value("Weights", zero::StateKind::Weights)
      .value("Gradients", zero::StateKind::Gradients)
      .value("Buckets", zero::StateKind::Buckets);
}

// transforms::Unobserved, as a context.
struct Apart {
  std::optional<transforms::Unobserved> keys;
};

void bind_early(py::module_& m) {
  using zero::EarlyParams;
  py::class_<Apart>(m, "Apart")
      .def(py::init())
      .def("__enter__", [](Apart& apart) { apart.keys.emplace(); })
      .def("__exit__", [](Apart& apart, const py::args&) { apart.keys.reset(); });
  using zero::ParamPartition;
  py::enum_<zero::ParamState>(m, "ParamState")
      .value("Sharded", zero::ParamState::Sharded)
      .value("Gathering", zero::ParamState::Gathering)
      .value("Ready", zero::ParamState::Ready);
  py::class_<ParamPartition>(m, "ParamPartition")
      .def_readonly("state", &ParamPartition::state)
      .def_readonly("partitioned", &ParamPartition::partitioned)
      .def_property_readonly("held", [](const ParamPartition& p) { return std::pair(p.held.begin, p.held.end); });
  py::class_<EarlyParams, std::shared_ptr<EarlyParams>>(m, "EarlyParams")
      .def(py::init([](const comm::Mesh& mesh, shard::Residence residence, const std::string& folder, bool pin) {
             zero::HomeMaker home;
             if (residence != shard::Residence::Device)
               home = offload::state_homes(
                   {.residence = residence, .folder = folder, .pin_memory = pin, .what = "parameters"});
             return std::make_shared<EarlyParams>(zero::Ranks(mesh), std::move(home));
           }),
           py::arg("mesh"), py::arg("residence") = shard::Residence::Device, py::arg("folder") = "",
           py::arg("pin_memory") = false)
      .def("add", &EarlyParams::add, py::arg("name"), py::arg("tensor"), py::arg("dtype"), NoGil())
      .def("gather", &EarlyParams::gather, py::arg("numbers"), py::arg("writes"), py::arg("writer"), NoGil())
      .def("release", &EarlyParams::release, py::arg("numbers"), py::arg("writes"), py::arg("writer"), NoGil())
      .def("is_gathered", &EarlyParams::is_gathered, py::arg("number"))
      .def("partition_of", &EarlyParams::partition_of, py::arg("number"))
      .def("held_values", &EarlyParams::held_values, py::arg("number"), NoGil())
      .def("restore", &EarlyParams::restore, py::arg("number"), NoGil())
      .def("prune", &EarlyParams::prune)
      .def("bytes", &EarlyParams::bytes);
}

using EngineClass = py::class_<Engine, std::shared_ptr<Engine>>;

void bind_training(EngineClass& c) {
  c.def("broadcast_buffers", &Engine::broadcast_buffers, py::arg("buffers"), NoGil())
      .def("check_not_captured", &Engine::check_not_captured, py::arg("call"))
      .def("pre_forward", &Engine::pre_forward, NoGil())
      .def("post_forward", &Engine::post_forward, py::arg("outputs"), NoGil())
      .def("abort_forward", &Engine::abort_forward, NoGil())
      .def("begin_backward", &Engine::begin_backward, py::arg("loss"), py::arg("scale_wrt_gas") = true, NoGil())
      .def("end_backward", &Engine::end_backward, py::arg("loss"), NoGil())
      .def("scale", on(kScaling, &engine::Scaling::scale), py::arg("loss"), NoGil())
      .def("scaler", [](Engine& e) { return e.scaling().scaler(); })
      .def("set_loss_scale", on(kScaling, &engine::Scaling::set_scale), py::arg("scale"))
      .def("override_loss_scale", on(kScaling, &engine::Scaling::override_scale), py::arg("scale"))
      .def("restore_scaler", on(kScaling, &engine::Scaling::restore), py::arg("state"))
      .def("gradient_loss_scale", on(kScaling, &engine::Scaling::gradient_scale))
      .def("step", &Engine::step, py::arg("external") = py::none(), py::arg("global_norm") = py::none(),
           py::arg("fault") = "", NoGil())
      .def("count_empty_steps", &Engine::count_empty_steps)
      .def("finish_update", &Engine::finish_update, NoGil())
      .def("set_fault", &Engine::set_fault, py::arg("fault"))
      .def(
          "set_client_terms",
          [](Engine& e, const std::vector<std::string>& lines,
             const std::vector<std::tuple<std::string, std::string, at::Tensor>>& on_device) {
            std::vector<engine::DeviceTerm> terms;
            for (const auto& [name, where, value] : on_device)
              terms.push_back({name, where, value});
            e.set_client_terms(lines, terms);
          },
          py::arg("lines"), py::arg("on_device"))
      .def("zero_grad", &Engine::zero_grad, NoGil())
      .def("is_gradient_accumulation_boundary", &Engine::is_gradient_accumulation_boundary)
      .def("set_gradient_accumulation_boundary", &Engine::set_gradient_accumulation_boundary, py::arg("boundary"))
      .def("set_gradient_accumulation_steps", &Engine::set_gradient_accumulation_steps, py::arg("steps"))
      .def("begin_no_sync", &Engine::begin_no_sync, NoGil())
      .def("end_no_sync", &Engine::end_no_sync, NoGil())
      .def("begin_coalesce", &Engine::begin_coalesce, NoGil())
      .def("end_coalesce", &Engine::end_coalesce, NoGil())
      .def("leave_coalesce", &Engine::leave_coalesce);
}

void bind_modules(EngineClass& c) {
  c.def("add_module", on(&Engine::modules, &zero::Modules::add), py::arg("params"))
      .def("enter_module", on(&Engine::modules, &zero::Modules::enter), py::arg("module"), NoGil())
      .def("note_inputs", on(&Engine::modules, &zero::Modules::note_inputs), py::arg("inputs"), NoGil())
      .def("leave_module", on(&Engine::modules, &zero::Modules::leave), py::arg("module"), py::arg("outputs"),
           py::arg("hides") = false, NoGil())
      .def("inside_module", [](Engine& e) { return !e.destroyed() && e.modules().inside(); })
      .def("use_elsewhere", on(&Engine::modules, &zero::Modules::use_elsewhere), py::arg("param"), NoGil())
      .def(
          "register_external",
          [](Engine& e, int module, zero::ParamId param) {
            e.check_one_thread("register_external_parameter");
            e.modules().register_external(module, param);
          },
          py::arg("module"), py::arg("param"), NoGil())
      .def("is_gathered", on(&Engine::regions, &zero::Regions::is_gathered), py::arg("param"))
      .def("partition_of", on(&Engine::regions, &zero::Regions::partition_of), py::arg("param"))
      .def("held_values", on(&Engine::regions, &zero::Regions::held_values), py::arg("param"), NoGil())
      .def(
          "gather",
          [](Engine& e, const std::vector<int>& params, zero::Writes writes, int writer) {
            e.check_one_thread("GatheredParameters");
            e.regions().open(params, writes, writer);
          },
          py::arg("params"), py::arg("writes"), py::arg("writer"), NoGil())
      .def("release", on(&Engine::regions, &zero::Regions::close), py::arg("params"), py::arg("writes"),
           py::arg("writer"), NoGil())
      .def("note_begun", on(&Engine::regions, &zero::Regions::note_begun), py::arg("params"))
      .def("note_ended", on(&Engine::regions, &zero::Regions::note_ended), py::arg("params"));
}

void bind_counters(EngineClass& c) {
  c.def("global_grad_norm", &Engine::global_grad_norm, NoGil())
      .def("grad_norm", &Engine::grad_norm, py::arg("fault") = "", NoGil())
      .def("clip_grad_norm", &Engine::clip_grad_norm, py::arg("max_norm"), py::arg("fault") = "", NoGil())
      .def("norm_contribution", &Engine::norm_contribution, py::arg("without") = std::vector<int>{},
           py::arg("fault") = "", NoGil())
      .def("check_step", &Engine::check_step, NoGil())
      .def("check_live", &Engine::check_live, py::arg("call"))
      .def("check_one_thread", &Engine::check_one_thread, py::arg("call"), py::arg("together") = true, NoGil())
      .def("was_step_applied", &Engine::was_step_applied)
      .def("has_gradients", &Engine::has_gradients)
      .def("take_notices", &Engine::take_notices)
      .def("sequence_fault", [](const Engine& engine) { return engine::sequence_fault(engine.mesh()); })
      .def("micro_steps", &Engine::micro_steps)
      .def("backwards", &Engine::backwards)
      .def("global_steps", &Engine::global_steps)
      .def("skipped_steps", &Engine::skipped_steps)
      .def("set_counters", &Engine::set_counters, py::arg("micro_steps"), py::arg("global_steps"),
           py::arg("skipped_steps"), py::arg("global_samples"))
      .def("global_samples", &Engine::global_samples)
      .def("set_micro_batch_size", &Engine::set_micro_batch_size, py::arg("samples"))
      // Groups are copied: destroy() frees the core's own.
      .def("groups", [](const Engine& e) { return e.groups(); })
      .def(
          "set_group", [](Engine& e, size_t index, const optim::GroupOptions& group) { e.groups().at(index) = group; },
          py::arg("index"), py::arg("group"))
      .def("options", &Engine::options, py::return_value_policy::reference_internal)
      .def("mesh", &Engine::mesh, py::return_value_policy::copy)  // it outlives the engine's end
      .def("memory", &Engine::memory)
      .def("keep_losses", &Engine::keep_losses)
      .def("set_loss", &Engine::set_loss, py::arg("loss"))
      // {phase: (seconds, how often)}
      .def("phases", [](Engine& e) {
        std::map<std::string, std::pair<double, int64_t>> found;
        for (const Phase phase : kPhases) {
          const auto& total = e.phases().total(phase);
          found[phase_name(phase)] = {std::chrono::duration<double>(total.time).count(), total.times};
        }
        return found;
      });
}

// What an optimizer of torch keeps, by an object of Python. Called without the GIL.
class PyKeptStates final : public engine::KeptStates {
 public:
  explicit PyKeptStates(py::object kept) : kept_(std::move(kept)) {}

  std::string name() const override {
    const py::gil_scoped_acquire gil;
    return kept_.attr("name").cast<std::string>();
  }
  bool has_states() const override {
    const py::gil_scoped_acquire gil;
    return kept_.attr("has_states")().cast<bool>();
  }
  State state(int param) const override {
    const py::gil_scoped_acquire gil;
    State state;
    for (const auto& [key, value] : kept_.attr("state")(param).cast<py::dict>())
      state.emplace(py::str(key), value_of(value));
    return state;
  }
  at::Tensor target(int param) const override {
    const py::gil_scoped_acquire gil;
    return kept_.attr("target")(param).cast<at::Tensor>();
  }
  void write_state(int param, const std::string& key, const at::Tensor& part) override {
    const py::gil_scoped_acquire gil;
    kept_.attr("write_state")(param, key, part);
  }

 private:
  static c10::IValue value_of(py::handle value) {
    if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
    if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
    if (py::isinstance<py::int_>(value) || py::isinstance<py::float_>(value)) return value.cast<double>();
    return {};
  }

  py::object kept_;
};

struct PyClientStates {
  PyClientStates(Engine& core, py::object kept) : kept(std::move(kept)), states(core, this->kept) {}
  PyKeptStates kept;
  engine::ClientStates states;
};

// `get`: the values that an object of Python has.
template <class Class, class Get>
void bind_values(py::class_<Class>& c, const Get& get) {
  c.def(
       "get_full",
       [get](Class& s, int param, const std::string& key) { return optional_tensor(get(s).get_full(param, key)); },
       py::arg("number"), py::arg("key"), NoGil())
      .def(
          "set_full",
          [get](Class& s, int param, const std::string& key, const at::Tensor& full) {
            get(s).set_full(param, key, full);
          },
          py::arg("number"), py::arg("key"), py::arg("full"), NoGil())
      .def(
          "get_local",
          [get](Class& s, int param, const std::string& key) { return optional_tensor(get(s).get_local(param, key)); },
          py::arg("number"), py::arg("key"), NoGil())
      .def(
          "set_local",
          [get](Class& s, int param, const std::string& key, const at::Tensor& part) {
            get(s).set_local(param, key, part);
          },
          py::arg("number"), py::arg("key"), py::arg("part"), NoGil());
}

void bind_states(py::module_& m) {
  using engine::OptimizerStates;
  py::class_<OptimizerStates> core(m, "OptimizerStates");
  core.def(py::init<Engine&>(), py::arg("engine"), py::keep_alive<1, 2>());
  bind_values(core, [](OptimizerStates& s) -> OptimizerStates& { return s; });
  py::class_<PyClientStates> client(m, "ClientStates");
  client.def(py::init<Engine&, py::object>(), py::arg("engine"), py::arg("kept"), py::keep_alive<1, 2>());
  bind_values(client, [](PyClientStates& s) -> engine::ClientStates& { return s.states; });
  client.def_static("is_part", &engine::is_part, py::arg("key"), py::arg("state"), py::arg("target"));
  client.def_static(
      "part_of_number",
      [](const std::string& key, const at::Tensor& state, const std::vector<int64_t>& whole, const at::Tensor& target) {
        return engine::part_of_number(key, state, whole, target).toTensor();
      },
      py::arg("key"), py::arg("state"), py::arg("whole"), py::arg("target"));
}

void bind_state(EngineClass& c) {
  c.def("params", &Engine::params, py::return_value_policy::copy)  // there may be more of them, elsewhere
      .def(
          "param", [](const Engine& e, size_t number) { return e.params().at(number); }, py::arg("number"))
      .def("number_of", &engine::number_of, py::arg("param"))
      .def("add_group", &Engine::add_group, py::arg("group"), NoGil())
      .def("add_param", &Engine::add_param, py::arg("param"), NoGil())
      .def("check_addition", &Engine::check_addition, py::arg("groups"), py::arg("params"), py::arg("known"), NoGil())
      .def("set_joins", &Engine::set_joins, py::arg("param"), py::arg("group"), NoGil())
      .def("join", &Engine::join, NoGil())
      .def("take_joined", &Engine::take_joined)
      .def("param_step", on(&Engine::layout, &zero::StateAccess::param_step), py::arg("param"), NoGil())
      .def("set_param_step", on(kStates, &zero::StateAccess::set_param_step), py::arg("param"), py::arg("step"),
           NoGil())
      .def(
          "get_full",
          [](Engine& e, int param, zero::Quantity what) { return optional_tensor(e.states().get_full(param, what)); },
          py::arg("param"), py::arg("what"), NoGil())
      .def("set_unrounded", on(kStates, &zero::StateAccess::set_unrounded), py::arg("param"), py::arg("value"), NoGil())
      .def("set_full", on(kStates, &zero::StateAccess::set_full), py::arg("param"), py::arg("what"), py::arg("value"),
           NoGil())
      .def(
          "local_view",
          [](Engine& e, int param, zero::Quantity what) { return optional_tensor(e.states().local_view(param, what)); },
          py::arg("param"), py::arg("what"), NoGil())
      .def("set_local", on(kStates, &zero::StateAccess::set_local), py::arg("param"), py::arg("what"), py::arg("value"),
           NoGil())
      .def("complete_gradient", on(kStates, &zero::StateAccess::complete_gradient), py::arg("param"), NoGil())
      .def("named_shards", on(kStates, &zero::StateAccess::named_shards), NoGil())
      .def(
          "read_shard", [](Engine& e, const shard::NamedShard& shard) { return e.states().read_shard(shard); },
          py::arg("shard"), NoGil())
      .def("local_range", on(&Engine::layout, &zero::StateAccess::local_range), py::arg("param"), NoGil())
      .def("gather_full", on(kStates, &zero::StateAccess::gather_full), py::arg("param"), py::arg("part"), NoGil())
      .def("local_part", on(kStates, &zero::StateAccess::local_part), py::arg("param"), py::arg("full"), NoGil())
      .def("agree_max", on(kStates, &zero::StateAccess::agree_max), py::arg("value"), NoGil())
      .def("refresh_params", &Engine::refresh_params, NoGil())
      .def("adopt_params", &Engine::adopt_params, NoGil())
      .def("offload_states", &Engine::offload_states, py::arg("kinds"), py::arg("to"), py::arg("pin_memory") = true,
           NoGil())
      .def("reload_states", &Engine::reload_states, NoGil())
      .def(
          "offload_plan",
          [](Engine& engine, bool measure) {
            if (measure) engine.measure_offload();
            return engine.offload_plan();
          },
          py::arg("measure") = false, NoGil())
      .def("states_are_away", &Engine::states_are_away)
      .def("destroy", &Engine::destroy, py::arg("waits") = true, NoGil())
      .def("destroyed", &Engine::destroyed);
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_writes(m);
  bind_residences(m);
  bind_early(m);
  bind_structs(m);
  EngineClass c(m, "Engine");
  c.def(py::init(&make_engine), py::arg("options"), py::arg("mesh"), py::arg("params"), py::arg("groups"));
  bind_training(c);
  bind_modules(c);
  bind_counters(c);
  bind_states(m);
  bind_state(c);
}

}  // namespace tessera::python

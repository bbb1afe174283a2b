#include "tessera/config/config.h"

#include <pybind11/stl.h>

#include <nlohmann/json.hpp>

#include "bindings.h"
#include "tessera/base/error.h"
#include "tessera/config/json.h"
#include "tessera/config/precision.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"

namespace tessera::python {
namespace {

using namespace config;

nlohmann::json to_json(py::handle value) {
  if (value.is_none()) return nullptr;
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) {
    // As a JSON parser does: what an integer of the core cannot hold is a float, and refused where it has to be one.
    int overflow = 0;
    const int64_t integer = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    return overflow == 0 ? nlohmann::json(integer) : nlohmann::json(value.cast<double>());
  }
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (py::isinstance<py::dict>(value)) {
    nlohmann::json object = nlohmann::json::object();
    for (const auto& [key, item] : value.cast<py::dict>())
      object[py::str(key).cast<std::string>()] = to_json(item);
    return object;
  }
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    nlohmann::json array = nlohmann::json::array();
    for (const auto& item : value)
      array.push_back(to_json(item));
    return array;
  }
  TESSERA_CHECK_VALUE(false, "config", "cannot read a value of type ", py::str(py::type::of(value)).cast<std::string>(),
                      "; use numbers, text, booleans, None, lists and dictionaries");
}

py::object to_python(const Value& value);

py::object to_python(const Params& params) {
  py::dict result;
  for (const auto& [key, item] : params)
    result[py::str(key)] = to_python(item);
  return result;
}

py::object to_python(const List& list) {
  py::list result;
  for (const auto& item : list)
    result.append(to_python(item));
  return result;
}

py::object to_python(const Value& value) {
  return std::visit(
      [](const auto& item) -> py::object {
        using T = std::decay_t<decltype(item)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return py::none();
        } else if constexpr (std::is_same_v<T, List> || std::is_same_v<T, Params>) {
          return to_python(item);
        } else {
          return py::cast(item);
        }
      },
      value.data);
}

void bind_sections(py::module_& m) {
  const auto params = [](const auto& section) { return to_python(section.params); };
  py::class_<Optimizer>(m, "OptimizerConfig")
      .def_readonly("type", &Optimizer::type)
      .def_property_readonly("params", [params](const Optimizer& s) { return params(s); });
  py::class_<Scheduler>(m, "SchedulerConfig")
      .def_readonly("type", &Scheduler::type)
      .def_property_readonly("params", [params](const Scheduler& s) { return params(s); });
  py::class_<Bf16>(m, "Bf16Config")
      .def_readonly("enabled", &Bf16::enabled)
      .def_readonly("check_grad_overflow", &Bf16::check_grad_overflow);
  py::class_<Fp16>(m, "Fp16Config")
      .def_readonly("enabled", &Fp16::enabled)
      .def_readonly("auto_cast", &Fp16::auto_cast)
      .def_readonly("loss_scale", &Fp16::loss_scale);
  py::class_<TorchAutocast>(m, "TorchAutocastConfig")
      .def_readonly("enabled", &TorchAutocast::enabled)
      .def_readonly("dtype", &TorchAutocast::dtype)
      .def_readonly("lower_precision_safe_modules", &TorchAutocast::lower_precision_safe_modules);
  py::class_<DataTypes>(m, "DataTypesConfig")
      .def_readonly("grad_accum_dtype", &DataTypes::grad_accum_dtype)
      .def_readonly("param_dtype", &DataTypes::param_dtype)
      .def_readonly("buffer_dtype", &DataTypes::buffer_dtype);
  py::class_<TensorParallel>(m, "TensorParallelConfig").def_readonly("autotp_size", &TensorParallel::autotp_size);
  py::class_<LeafModule>(m, "LeafModule")
      .def(py::init<>())
      .def_readonly("classes", &LeafModule::classes)
      .def_readonly("names", &LeafModule::names)
      .def_readonly("name_suffixes", &LeafModule::name_suffixes);
  py::class_<ZeroOptimization>(m, "ZeroConfig")
      .def_readonly("stage", &ZeroOptimization::stage)
      .def_readonly("contiguous_gradients", &ZeroOptimization::contiguous_gradients)
      .def_readonly("reduce_scatter", &ZeroOptimization::reduce_scatter)
      .def_readonly("reduce_bucket_size", &ZeroOptimization::reduce_bucket_size)
      .def_readonly("allgather_partitions", &ZeroOptimization::allgather_partitions)
      .def_readonly("allgather_bucket_size", &ZeroOptimization::allgather_bucket_size)
      .def_readonly("overlap_comm", &ZeroOptimization::overlap_comm)
      .def_readonly("load_from_fp32_weights", &ZeroOptimization::load_from_fp32_weights)
      .def_readonly("ignore_unused_parameters", &ZeroOptimization::ignore_unused_parameters)
      .def_readonly("stage3_gather_16bit_weights_on_model_save",
                    &ZeroOptimization::stage3_gather_16bit_weights_on_model_save)
      .def_readonly("stage3_module_granularity_threshold", &ZeroOptimization::stage3_module_granularity_threshold)
      .def_readonly("mics_shard_size", &ZeroOptimization::mics_shard_size)
      .def_readonly("leaf_module", &ZeroOptimization::leaf_module);
}

void bind_tree(py::module_& m) {
  py::class_<Batch>(m, "Batch")
      .def_readonly("train_batch_size", &Batch::train_batch_size)
      .def_readonly("micro_batch_size", &Batch::micro_batch_size)
      .def_readonly("gradient_accumulation_steps", &Batch::gradient_accumulation_steps);
  py::enum_<GradientOp>(m, "GradientOp").value("Mean", GradientOp::Mean).value("Sum", GradientOp::Sum);

  py::class_<Config>(m, "Config")
      .def_static("from_file", &Config::from_file, py::arg("path"))
      .def_static("from_json", &Config::from_json, py::arg("text"))
      .def_static(
          "from_dict", [](const py::dict& value) { return from_value(to_json(value)); }, py::arg("value"))
      .def("resolve_batch", &Config::resolve_batch, py::arg("data_parallel_size"))
      .def("describe", &Config::describe, py::arg("all") = true)
      .def_readonly("warnings", &Config::warnings)
      .def_readonly("given", &Config::given)
      .def_readonly("optimizer", &Config::optimizer)
      .def_readonly("scheduler", &Config::scheduler)
      .def_readonly("gradient_clipping", &Config::gradient_clipping)
      .def_readonly("managed_gradient_accumulation", &Config::managed_gradient_accumulation)
      .def_readonly("gradient_allreduce_op", &Config::gradient_allreduce_op)
      .def_readonly("prescale_gradients", &Config::prescale_gradients)
      .def_readonly("gradient_predivide_factor", &Config::gradient_predivide_factor)
      .def_readonly("communication_data_type", &Config::communication_data_type)
      .def_readonly("bf16", &Config::bf16)
      .def_readonly("fp16", &Config::fp16)
      .def_readonly("torch_autocast", &Config::torch_autocast)
      .def_readonly("data_types", &Config::data_types)
      .def_readonly("zero_optimization", &Config::zero_optimization)
      .def_readonly("zero_allow_untested_optimizer", &Config::zero_allow_untested_optimizer)
      .def_readonly("tensor_parallel", &Config::tensor_parallel)
      .def_readonly("data_parallel_size", &Config::data_parallel_size)
      .def_readonly("sequence_parallel_size", &Config::sequence_parallel_size)
      .def_readonly("steps_per_print", &Config::steps_per_print)
      .def_readonly("wall_clock_breakdown", &Config::wall_clock_breakdown)
      .def_readonly("dataloader_drop_last", &Config::dataloader_drop_last);
}

}  // namespace

void bind_config(py::module_& m) {
  bind_sections(m);
  bind_tree(m);
  m.def("check_served", &check_served, py::arg("config"));
  m.def("precision", &precision, py::arg("config"));
  m.def("optimizer_kind", &optimizer_kind, py::arg("config"));
}

}  // namespace tessera::python

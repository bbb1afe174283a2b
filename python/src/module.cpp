#include "bindings.h"

#include <torch/version.h>

#include "tessera/base/error.h"
#include "tessera/base/version.h"
#include "tessera/config/text.h"
#include "tessera/pipeline/wire.h"

namespace {

const char* kind_of(const tessera::config::Problem& problem) {
  using Kind = tessera::config::Problem::Kind;
  switch (problem.kind) {
    case Kind::Unknown:
      return "unknown";
    case Kind::Value:
      return "value";
    case Kind::Rule:
      return "rule";
    case Kind::Ranks:
      return "ranks";
  }
  return "";
}

// Errors of the core arrive as those of the package; all else as torch translates it.
void translate(std::exception_ptr error) {
  const auto raise = [](const char* name, const c10::Error& e) {
    const auto type = pybind11::module_::import("tessera.errors").attr(name);
    PyErr_SetString(type.ptr(), e.what_without_backtrace());
  };
  const auto raise_config = [](const tessera::config::InvalidConfig& e) {
    const auto errors = pybind11::module_::import("tessera.errors");
    const pybind11::object error = errors.attr("ConfigError")(e.what_without_backtrace());
    pybind11::list problems;
    for (const auto& problem : e.problems())
      problems.append(errors.attr("Problem")(problem.path, problem.text, kind_of(problem)));
    error.attr("problems") = pybind11::tuple(problems);
    PyErr_SetObject(pybind11::type::of(error).ptr(), error.ptr());
  };
  try {
    std::rethrow_exception(std::move(error));
  } catch (const tessera::UsageError& e) {
    raise("UsageError", e);
  } catch (const tessera::IoError& e) {
    raise("IoError", e);
  } catch (const tessera::pipeline::StageFailed& e) {
    raise("StageFailed", e);
  } catch (const tessera::config::InvalidConfig& e) {
    raise_config(e);
  } catch (const c10::ValueError& e) {
    raise("ConfigError", e);
  }
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  using namespace tessera::python;
  pybind11::register_local_exception_translator(&translate);
  m.doc() = "Bindings of the Tessera core; use the package `tessera`.";
  m.attr("torch_version") = TORCH_VERSION;  // compiled against; tessera/__init__.py compares
  m.attr("version") = tessera::version();
  // Types of torch.distributed must exist before ours mention them.
  py::module_::import("torch");
  bind_comm(m);
  bind_options(m);
  bind_scaler(m);
  bind_optimizer(m);
  bind_schedule(m);
  bind_config(m);
  bind_commands(m);
  bind_contents(m);
  bind_engine(m);
  bind_checkpoint(m);
  bind_unit_policy(m);
  bind_flops(m);
  bind_watch(m);
  bind_parallel(m);
  bind_pipeline(m);
  bind_link(m);
}

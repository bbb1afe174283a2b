// The binding functions, one per public header of the core. They convert and forward; rules live in the core or in
// python/tessera.
//
// Note [GIL]
//   Every call that may wait (collectives, autograd, thread joins) releases the GIL, so that ranks which are Python
//   threads of one process can wait for each other. Engines are destroyed without the GIL for the same reason. A Python callable
//   handed to the core is held by pybind11's std::function wrapper, which takes the GIL to call and to drop it.
//   The core takes the GIL itself where it changes hooks on parameters (zero::ReaderLock): the garbage collector reads them.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/shard/cut.h"

namespace tessera::python {

namespace py = pybind11;

// Deletes without the GIL, whether the thread has it or not: process groups behind an object wait for threads when they go (see
// hold() in comm.cpp), an engine for its collectives. Note [GIL].
template <class T>
struct Unlocked {
  void operator()(T* object) const {
    std::optional<py::gil_scoped_release> unlocked;
    if (PyGILState_Check() != 0) unlocked.emplace();
    delete object;
  }
};

void bind_checkpoint(py::module_& m);   // engine/checkpoint.h, checkpoint/reader.h
void bind_comm(py::module_& m);         // comm/backends.h, comm/mesh.h
void bind_commands(py::module_& m);     // commands/commands.h, config/estimate.h, config/source.h
void bind_config(py::module_& m);       // config/config.h, config/precision.h, config/resolve.h, config/served.h
void bind_contents(py::module_& m);     // engine/contents.h
void bind_engine(py::module_& m);       // engine/engine.h
void bind_flops(py::module_& m);        // engine/flops_profile.h
void bind_link(py::module_& m);         // pipeline/link.h
void bind_optimizer(py::module_& m);    // optim/optimizer.h, optim/whole.h
void bind_options(py::module_& m);      // amp/autocast.h, amp/precision.h, shard/placement.h, zero/options.h
void bind_parallel(py::module_& m);     // parallel/*.h
void bind_pipeline(py::module_& m);     // pipeline/*.h
void bind_scaler(py::module_& m);       // amp/grad_scaler.h
void bind_schedule(py::module_& m);     // optim/schedule.h
void bind_unit_policy(py::module_& m);  // engine/unit_policy.h
void bind_watch(py::module_& m);        // engine/watch.h, io/metrics.h

// (sizes of the whole, dim, [(begin, end), ...] of that dim)
using CutArgs = std::tuple<std::vector<int64_t>, int64_t, std::vector<std::pair<int64_t, int64_t>>>;
inline shard::CutPtr to_cut(const CutArgs& args) {
  std::vector<shard::Range> ranges;
  for (const auto& [begin, end] : std::get<2>(args))
    ranges.push_back({begin, end});
  return shard::cut_along(std::get<0>(args), std::get<1>(args), ranges);
}

}  // namespace tessera::python

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>

#include "bindings.h"
#include "tessera/base/error.h"
#include "tessera/base/free_port.h"
#include "tessera/base/launch_options.h"
#include "tessera/comm/averages.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/c10d/point_to_point.h"
#include "tessera/comm/c10d/transport.h"
#include "tessera/comm/c10d/watched_store.h"
#include "tessera/comm/hosts/hosts.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/timed_group.h"
#include "tessera/comm/torch_backend/tessera_backend.h"

namespace tessera::python {

using NoGil = py::call_guard<py::gil_scoped_release>;

namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Holds a process group, which waits, when it goes, for its threads, and those may wait for the interpreter's lock: to let go of
// tensors that Python knows. Where ours is the last hold on it, it goes without the lock.
std::shared_ptr<c10d::ProcessGroup> hold(ProcessGroupPtr group) {
  c10d::ProcessGroup* const held = group.release();
  return {held, [](c10d::ProcessGroup* held) {
            std::optional<py::gil_scoped_release> unlocked;
            if (PyGILState_Check() != 0) unlocked.emplace();
            ProcessGroupPtr::reclaim(held);
          }};
}

comm::GroupPtr group_by_name(const std::string& name) {
  ProcessGroupPtr group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    return comm::c10d_group(name);  // the call says what is wrong
  }
  return comm::c10d_group(&hold, *group);
}

// Holds messages as hold() does groups.
comm::PointToPointPtr unlocked(comm::PointToPointPtr made) {
  comm::PointToPoint* const held = made.get();
  return {held, [made = std::move(made)](comm::PointToPoint*) mutable {
            std::optional<py::gil_scoped_release> unlocked;
            if (PyGILState_Check() != 0) unlocked.emplace();
            made.reset();
          }};
}

// Messages over the group's back end for tensors of `device`, where the group has such a one; else over that of the CPU.
comm::PointToPointPtr point_to_point(const std::string& name, c10::Device device) {
  const auto group = c10d::resolve_process_group(name);
  const auto backend = [&](c10::DeviceType type) -> c10::intrusive_ptr<c10d::Backend> {
    try {
      return group->getBackend(type);
    } catch (const c10::Error&) {
      return nullptr;
    }
  };
  const auto own = backend(device.type()), host = backend(c10::kCPU);
  TESSERA_CHECK_VALUE(own || host, "comm", "process group '", name, "' has no back end for the CPU or for ", device);
  const bool on_device = own && (!host || own->getBackendName() != host->getBackendName());
  return unlocked(on_device ? comm::c10d_point_to_point(own, device) : comm::c10d_point_to_point(host));
}

// Makes the other ranks of the group notice when this process ends, from here on.
void show_process(const std::string& name) {
  const auto group = c10d::resolve_process_group(name);
  if (const auto store = group->getStore()) comm::job_board(store, group->getRank(), group->getSize()).show_process();
}

// How long a wait in the group may take; nothing where its back end does not tell.
std::optional<std::chrono::milliseconds> group_timeout(const std::string& name, const c10::Device& device) {
  try {
    return c10d::resolve_process_group(name)->getBackend(device.type())->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

// Returns what every rank of a process group says; this rank's alone where they have no store.
std::vector<std::string> exchange_ranks(const std::string& name, const std::string& topic, const std::string& text) {
  const auto group = c10d::resolve_process_group(name);
  const auto store = group->getStore();
  if (!store) return {text};
  return comm::exchange_all(store, group->getRank(), group->getSize(), topic, text);
}

void bind_timed(py::module_& m) {
  using namespace comm;
  py::class_<CallTime>(m, "CallTime")
      .def_readonly("op", &CallTime::op)
      .def_readonly("label", &CallTime::label)
      .def_readonly("bytes", &CallTime::bytes)
      .def_readonly("ranks", &CallTime::ranks)
      .def_readonly("seconds", &CallTime::seconds);
  py::class_<CallTimes>(m, "CallTimes")
      .def_readonly("op", &CallTimes::op)
      .def_readonly("bytes", &CallTimes::bytes)
      .def_readonly("ranks", &CallTimes::ranks)
      .def_readonly("calls", &CallTimes::calls)
      .def_readonly("seconds", &CallTimes::seconds)
      .def_property_readonly("algorithm_bandwidth", &CallTimes::algorithm_bandwidth)
      .def_property_readonly("bus_bandwidth", &CallTimes::bus_bandwidth);
  py::class_<CallRecord, std::shared_ptr<CallRecord>>(m, "CallRecord")
      .def(py::init<std::vector<std::string>>(), py::arg("ops"))
      .def("totals", &CallRecord::totals)
      .def("take_calls", &CallRecord::take_calls)
      .def("reset", &CallRecord::reset);
  m.def("timed_mesh", &timed_mesh, py::arg("mesh"), py::arg("record"));
}

// Binds what has threads of ours; they end before Python does: Note [Python's end].
void bind_backend(py::module_& m) {
  const auto threads = std::make_shared<comm::SideThreads>();
  m.def(
      "tessera_backend",
      [threads](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout) {
        return comm::tessera_backend(store, rank, size, timeout, threads);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), NoGil());
  m.def(
      "store_point_to_point",
      [threads](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
                bool shares) {
        return unlocked(comm::store_point_to_point(store, rank, size, timeout, shares, threads));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("shares"), NoGil());
  py::module_::import("atexit").attr("register")(
      py::cpp_function([threads] { threads->stop(std::chrono::seconds(5)); }, NoGil()));
}

// What `tessera launch` has of base/launch_options.h.
void bind_launch_options(py::module_& m) {
  m.attr("launch_port") = kLaunchPort;
  m.attr("highest_port") = kHighestPort;
  m.attr("shown_lines") = kShownLines;
  m.def("option_number", &option_number, py::arg("text"), py::arg("least"), py::arg("most"));
  m.def("why_no_number", &why_no_number, py::arg("option"), py::arg("text"), py::arg("least"), py::arg("most"));
  m.def("why_no_node", &why_no_node, py::arg("nodes"), py::arg("node"), py::arg("address"));
  m.def("why_no_host", &why_no_host, py::arg("host"), NoGil());
  m.def("why_no_logs", &why_no_logs, py::arg("folder"), NoGil());
  m.def("port_in_use", &port_in_use, py::arg("port"), py::arg("option"), py::arg("nodes"));
  m.def("listed_devices", &listed_devices, py::arg("visible"));
  m.def("threads_of_rank", &threads_of_rank, py::arg("ranks"));
  m.def("shell_code", &shell_code, py::arg("code"));
  m.def("failed_first", &failed_first, py::arg("rank"), py::arg("code"));
  m.def("interrupted_by", &interrupted_by, py::arg("signal"));
  py::class_<Tracebacks>(m, "Tracebacks")
      .def(py::init<>())
      .def("take", &Tracebacks::take, py::arg("line"))
      .def("rest", &Tracebacks::rest);
}

}  // namespace

void bind_comm(py::module_& m) {
  using namespace comm;

  py::class_<OpStats>(m, "OpStats").def_readonly("calls", &OpStats::calls).def_readonly("bytes", &OpStats::bytes);
  py::class_<CommStats>(m, "CommStats")
      .def_readonly("all_gather", &CommStats::all_gather)
      .def_readonly("reduce_scatter", &CommStats::reduce_scatter)
      .def_readonly("all_reduce", &CommStats::all_reduce)
      .def_readonly("broadcast", &CommStats::broadcast)
      .def_readonly("all_to_all", &CommStats::all_to_all)
      .def_readonly("barrier", &CommStats::barrier);

  py::class_<Group, GroupPtr>(m, "Group",
                              "Ranks that talk to each other. A call with a `label`, which errors name, is collective.")
      .def_property_readonly("rank", &Group::rank, "This rank's number, from 0.")
      .def_property_readonly("size", &Group::size, "How many ranks there are.")
      .def_property_readonly("name", &Group::name, "The group's name in errors.")
      .def(
          "barrier", [](Group& group) { group.barrier("barrier"); }, NoGil(),
          "Waits until all ranks have come. Collective.")
      .def(
          "broadcast",
          [](Group& group, const at::Tensor& tensor, int root, const std::string& label) {
            group.broadcast(tensor, root, label).wait();
          },
          py::arg("tensor"), py::arg("root"), py::arg("label"), NoGil(),
          "Gives `tensor` the values that it has on rank `root`.")
      .def(
          "all_gather",
          [](Group& group, const at::Tensor& out, const at::Tensor& in, const std::string& label) {
            group.all_gather(out, in, label).wait();
          },
          py::arg("out"), py::arg("in_"), py::arg("label"), NoGil(),
          "Puts `in_` of every rank into `out`, one after the other.")
      .def("abort", &Group::abort, py::arg("reason"), NoGil(),
           "Ends the group: who waits for this rank, now or later, gets an error with `reason`. Local.")
      .def(
          "stats", [](const Group& group) { return group.stats(); },
          "Bytes and calls of this rank since the group was made, by operation. Local.")
      .def("reset_stats", &Group::reset_stats, "Begins those counts anew. Local.");

  m.def("single_group", &single_group);
  m.def("thread_groups", &thread_groups, py::arg("size"), py::arg("timeout") = std::chrono::minutes(10));
  m.def("c10d_group", &group_by_name, py::arg("name"), NoGil());

  py::class_<PointToPoint, PointToPointPtr>(m, "PointToPoint");
  m.def("point_to_point", &point_to_point, py::arg("name"), py::arg("device"), NoGil());

  py::class_<Launch>(m, "Launch")
      .def_readonly("rank", &Launch::rank)
      .def_readonly("size", &Launch::size)
      .def_readonly("local_rank", &Launch::local_rank)
      .def_readonly("local_size", &Launch::local_size)
      .def_readonly("address", &Launch::address)
      .def_readonly("port", &Launch::port);
  m.def(
      "read_launch",
      [](int rank, int size, bool discover, bool rendezvous, int port) {
        return read_launch({rank, size, discover, rendezvous, port});
      },
      py::arg("rank"), py::arg("size"), py::arg("discover"), py::arg("rendezvous"), py::arg("port"));
  m.def("launched_local_rank", [] { return launched_local_rank(); });
  m.def("why_not_started_here", [] { return why_not_started_here(); });
  bind_launch_options(m);
  m.def("free_port", [] {
    HeldPort held = hold_free_port();
    static_cast<void>(held.release());  // open until the process ends
    return held.port();
  });

  m.def("host_id", &host_id);
  m.def("start_of_process", &start_of_process, py::arg("pid"));
  m.def("open_job_store", &open_job_store, py::arg("address"), py::arg("port"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), NoGil());
  m.def("show_process", &show_process, py::arg("name"), NoGil());
  m.def("group_timeout", &group_timeout, py::arg("name"), py::arg("device"));
  m.def("exchange_all", &exchange_all, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("topic"),
        py::arg("text"), NoGil());
  m.def("exchange_ranks", &exchange_ranks, py::arg("name"), py::arg("topic"), py::arg("text"), NoGil());
  bind_backend(m);

  py::enum_<Axis>(m, "Axis")
      .value("DpReplicate", Axis::DpReplicate)
      .value("DpShard", Axis::DpShard)
      .value("Sp", Axis::Sp)
      .value("Tp", Axis::Tp);
  py::class_<Axes>(m, "Axes")
      .def(py::init<Axis>())
      .def(py::init([](const std::vector<Axis>& axes) {
        Axes set;
        for (const Axis axis : axes)
          set = set.with(axis);
        return set;
      }))
      .def_property_readonly("name", &Axes::name)
      .def("__eq__", [](const Axes& a, const Axes& b) { return a == b; });
  py::implicitly_convertible<Axis, Axes>();
  py::implicitly_convertible<py::list, Axes>();
  py::class_<MeshShape>(m, "MeshShape")
      .def("size", &MeshShape::size, py::arg("axes"))
      .def("ranks_along", &MeshShape::ranks_along, py::arg("axes"), py::arg("rank"))
      .def("groups", &MeshShape::groups);
  m.def("mesh_shape", &mesh_shape, py::arg("world"), py::arg("shards") = -1, py::arg("sp") = 1, py::arg("tp") = 1);
  m.def("check_sizes", &check_sizes, py::arg("mesh"), py::arg("sp"), py::arg("tp"));
  m.def(
      "check_asked",
      [](Group& group, c10::Device device, int shards, int sp, int tp) { check_asked(group, device, shards, sp, tp); },
      py::arg("group"), py::arg("device"), py::arg("shards"), py::arg("sp"), py::arg("tp"), NoGil());
  py::class_<Mesh>(m, "Mesh", "Ranks on named axes: dp_replicate, dp_shard, sp and tp. Each has its group of ranks.")
      .def(py::init<>())
      .def(py::init<GroupPtr>(), py::arg("dp_shard"))
      .def("set", &Mesh::set, py::arg("axes"), py::arg("group"), py::return_value_policy::reference_internal,
           "Puts `group` along an axis, or along several together; returns the mesh.")
      .def("group", &Mesh::group, py::arg("axes"), "The ranks along an axis, or along several together.")
      .def("size", &Mesh::size, py::arg("axes"), "How many ranks there are along them.")
      .def("rank", &Mesh::rank, py::arg("axes"), "This rank's number along them.")
      .def(
          "batch_size", [](const Mesh& mesh) { return mesh.size(kBatchAxes); },
          "How many ranks have batches of their own.")
      .def("batch_rank", [](const Mesh& mesh) { return mesh.rank(kBatchAxes); }, "This rank's number among those.");
  m.def("sum_over_batch", &sum_over_batch, py::arg("mesh"), py::arg("value"), NoGil());
  m.def("mean_over_batch", &mean_over_batch, py::arg("mesh"), py::arg("value"), NoGil());
  m.def("token_mean", &token_mean, py::arg("mesh"), py::arg("sum"), py::arg("count"), NoGil());
  bind_timed(m);
}

}  // namespace tessera::python

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <csignal>
#include <map>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/c10d/devices.h"
#include "tessera/comm/c10d/gloo.h"
#include "tessera/comm/c10d/group.h"
#include "tessera/comm/c10d/point_to_point.h"
#include "tessera/comm/c10d/transport.h"
#include "tessera/comm/c10d/watched_store.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/parts.h"

namespace tessera::comm {
namespace {

// This process among the others.
struct Rank : Launch {
  RankDevice device = {};
};

Rank read_own() {
  const Rank own{read_launch()};
  check_transport();
  return own;
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

// A store that this process hosts stays until the process ends. When its last group here goes, a peer may just have come to
// it for the next group, or be about to read what made the last one. The stores are never destroyed: they have threads, and a
// forked copy of the process would wait for these as it exits.
void keep(int port, const c10::intrusive_ptr<c10d::Store>& store) {
  static std::mutex mutex;
  static auto& by_port = *new std::map<int, c10::intrusive_ptr<c10d::Store>>;
  const std::scoped_lock lock(mutex);
  by_port.try_emplace(port, store);
}

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The group of `size` ranks that use `store`, of which this process is number `rank`.
GroupPtr group_at(const Rank& own, const StorePtr& store, int rank, int size, const std::string& name,
                  std::chrono::milliseconds timeout) {
  using Group = c10d::ProcessGroup;
  if (size == 1) return single_group();
  const auto made = std::make_shared<c10::intrusive_ptr<Group>>();
  const auto gloo_group = [=, loopback = is_loopback(own.address)] {
    auto& group = *made;
    if (group) return make_c10d_group(nullptr, group, C10dPath::ByDevice);
    group = c10::make_intrusive<Group>(store, rank, size);
    group->setBackend(
        c10::DeviceType::CPU, Group::BackendType::GLOO,
        gloo_backend(c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, size, timeout, loopback));
    group->setDefaultBackend(Group::BackendType::GLOO);
    add_device_backend(own.device, *group, store, timeout);
    group->setGroupName(name);
    return make_c10d_group(nullptr, group, C10dPath::ByDevice);
  };
  GroupPtr host =
      choose_transport(c10::make_intrusive<c10d::PrefixStore>("transport", store), rank, size, timeout, gloo_group);
  if (!own.device.is_used() || is_c10d_group(*host)) return host;
  gloo_group();
  return make_c10d_group(nullptr, *made, C10dPath::ByDevice, std::move(host));
}

// Gloo and the store write to sockets whose peer may have died; unless the program has a handler of its own, such a write must
// be an error of the call and not the end of this process too. (Python ignores the signal from the start.)
void survive_closed_sockets() {
  struct sigaction now{};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

// Calls body(store), once this process has found the others there.
template <class F>
auto among_others(Rank& own, std::chrono::milliseconds timeout, const F& body) {
  survive_closed_sockets();
  std::string text;
  StorePtr store;
  try {
    store = open_job_store(own.address, own.port, own.rank, own.size, timeout);
    if (own.rank == 0) keep(own.port, store);
    const StorePtr watched = watch_store(store, own.rank, own.size);
    own.device = find_device(own, *watched);
    auto made = body(watched);
    leave_together(*watched, own.rank, own.size);
    return made;
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::exception& error) {
    text = what_happened(error, own.address, own.port);
    if (constexpr std::string_view origin = "[comm] "; text.starts_with(origin)) text.erase(0, origin.size());
    if (store) job_board(store, own.rank, own.size).report(c10::str("rank ", own.rank, ": ", text));
  }
  TESSERA_CHECK_DIST(false, "comm", "rank ", own.rank, " of ", own.size, " could not meet the others at ", own.address,
                     ":", own.port, ": ", text);
}

}  // namespace

GroupPtr environment_group(std::chrono::milliseconds timeout) {
  Rank own = read_own();
  if (own.size == 1) return single_group();
  return among_others(own, timeout, [&](const StorePtr& store) {
    return group_at(own, store, own.rank, own.size, "tessera_world", timeout);
  });
}

namespace {

// The groups of a mesh whose ranks are `first` and those behind it, of which this process is number `rank`.
Mesh mesh_in(const Rank& own, const StorePtr& store, const MeshShape& shape, int rank, int first,
             std::chrono::milliseconds timeout) {
  Mesh mesh;
  for (const Axes axes : shape.groups()) {
    const std::vector<int> ranks = shape.ranks_along(axes, rank);
    const auto number = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    const std::string name = c10::str("tessera_", axes.name(), "_of_", first + ranks.front());
    mesh.set(axes, group_at(own, c10::make_intrusive<c10d::PrefixStore>(name, store), static_cast<int>(number),
                            static_cast<int>(ranks.size()), name, timeout));
  }
  return mesh;
}

// Calls check_asked() with what every rank writes into the store.
void compare(const Rank& own, const StorePtr& store, const std::string& asked) {
  const auto key = [](int rank) { return "asked_" + std::to_string(rank); };
  store->set(key(own.rank), asked);
  std::vector<std::string> of_all;
  for (int rank = 0; rank < own.size; ++rank)
    of_all.push_back(announced_by(*store, key(rank), rank));
  check_asked(of_all);
}

std::string text_of(const std::vector<MeshShape>& shapes) {
  std::string text;
  for (size_t part = 0; part < shapes.size(); ++part)
    for (const Axis axis : kAxes)
      text += c10::str(text.empty() ? "" : ", ", axis_name(axis), " ", shapes[part].size(axis), " in part ", part);
  return text;
}

// The groups of `shape` that this process is in, once all ranks have `asked` for the same. Collective.
Mesh mesh_along(Rank& own, const std::string& asked, const MeshShape& shape, std::chrono::milliseconds timeout) {
  if (own.size == 1) return {};
  return among_others(own, timeout, [&](const StorePtr& store) {
    compare(own, store, asked);
    if (shape.size(Axis::DpShard) < own.size) return mesh_in(own, store, shape, own.rank, 0, timeout);
    return Mesh(group_at(own, store, own.rank, own.size, "tessera_world", timeout));
  });
}

}  // namespace

Mesh environment_mesh(int shards, int sp, int tp, std::chrono::milliseconds timeout) {
  Rank own = read_own();
  return mesh_along(own, asked_text(shards, sp, tp), mesh_shape(own.size, shards, sp, tp), timeout);
}

Mesh environment_mesh(const std::map<Axis, int>& sizes, std::chrono::milliseconds timeout) {
  Rank own = read_own();
  MeshShape shape;
  std::string text;
  for (const auto& [axis, size] : sizes) {
    TESSERA_CHECK_VALUE(size >= 1, "comm", "a mesh has ", size, " ranks along ", axis_name(axis));
    shape.sizes[static_cast<size_t>(axis)] = size;
    text += c10::str(text.empty() ? "" : " x ", axis_name(axis), " ", size);
  }
  const int product = shape.size(kAxes);
  const bool rest = !sizes.contains(Axis::DpShard);
  TESSERA_CHECK_VALUE(rest ? own.size % product == 0 : own.size == product, "comm", "a mesh of ", text, " has ",
                      product, " ranks, which ", rest ? "do not divide" : "are not", " WORLD_SIZE ", own.size);
  if (rest) shape.sizes[static_cast<size_t>(Axis::DpShard)] = own.size / product;
  return mesh_along(own, text_of({shape}), shape, timeout);
}

int environment_size() {
  return read_own().size;
}
int environment_rank() {
  return read_own().rank;
}
int environment_local_rank() {
  return read_own().local_rank;
}
c10::Device environment_device() {
  return own_device(environment_local_rank()).value_or(c10::kCPU);
}

Parts environment_parts(const std::vector<MeshShape>& shapes, std::chrono::milliseconds timeout) {
  Rank own = read_own();
  Parts parts;
  parts.shapes = shapes;
  const int world = parts.rank_of(static_cast<int>(shapes.size()), 0);
  TESSERA_CHECK_VALUE(world == own.size, "comm", "the parts of the program have ", world,
                      " ranks in all, but WORLD_SIZE is ", own.size);
  while (parts.rank_of(parts.part + 1, 0) <= own.rank)
    ++parts.part;
  if (own.size == 1) {
    parts.everyone = single_group();
    return parts;
  }
  return among_others(own, timeout, [&](const StorePtr& store) {
    const auto at = [&](const char* name) { return c10::make_intrusive<c10d::PrefixStore>(name, store); };
    compare(own, store, text_of(shapes));
    const int first = parts.rank_of(parts.part, 0);
    parts.everyone = group_at(own, at("everyone"), own.rank, own.size, "tessera_everyone", timeout);
    parts.mesh = mesh_in(own, at("mesh"), shapes[parts.part], own.rank - first, first, timeout);
    parts.p2p =
        c10d_point_to_point(point_to_point_backend(at("p2p"), own.rank, own.size, timeout, is_loopback(own.address)));
    return parts;
  });
}

std::vector<Parts> environment_overlaid_parts(const std::vector<MeshShape>& shapes, const std::vector<int>& given,
                                              std::chrono::milliseconds timeout) {
  Rank own = read_own();
  const std::vector<int> firsts = check_overlaid(shapes, given, own.size);
  std::vector<Parts> all;
  for (int part = 0; part < static_cast<int>(shapes.size()); ++part)
    if (own.rank >= firsts[part] && own.rank < firsts[part] + shapes[part].size(kAxes))
      all.push_back({shapes, part, Mesh(), single_group(), nullptr, firsts});
  if (own.size == 1) return all;
  return among_others(own, timeout, [&](const StorePtr& store) {
    const auto at = [&](const std::string& name) { return c10::make_intrusive<c10d::PrefixStore>(name, store); };
    compare(own, store, c10::str(text_of(shapes), " from ", firsts));
    const auto everyone = group_at(own, at("everyone"), own.rank, own.size, "tessera_everyone", timeout);
    const auto p2p =
        c10d_point_to_point(point_to_point_backend(at("p2p"), own.rank, own.size, timeout, is_loopback(own.address)));
    for (Parts& parts : all) {
      parts.everyone = everyone;
      parts.mesh = mesh_in(own, at(c10::str("mesh", parts.part)), shapes[parts.part], parts.place(),
                           parts.rank_of(parts.part, 0), timeout);
      parts.p2p = p2p;
    }
    return all;
  });
}

}  // namespace tessera::comm

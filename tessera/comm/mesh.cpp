#include "tessera/comm/mesh.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <sstream>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"

namespace tessera::comm {
namespace {

void check_live(const GroupPtr& single) {
  TESSERA_CHECK(single != nullptr, "comm.mesh",
                "this mesh was moved from; use the one that it was moved to, or pass a copy");
}

}  // namespace

const char* axis_name(Axis axis) {
  switch (axis) {
    case Axis::DpReplicate:
      return "dp_replicate";
    case Axis::DpShard:
      return "dp_shard";
    case Axis::Sp:
      return "sp";
    case Axis::Tp:
      return "tp";
  }
  return "?";
}

std::string Axes::name() const {
  std::string text;
  for (const Axis axis : kAxes)
    if (has(axis)) text += (text.empty() ? "" : " x ") + std::string(axis_name(axis));
  return text;
}

int MeshShape::size(Axes axes) const {
  int product = 1;
  for (const Axis axis : kAxes)
    if (axes.has(axis)) product *= sizes[static_cast<size_t>(axis)];
  return product;
}

std::vector<int> MeshShape::ranks_along(Axes axes, int rank) const {
  std::vector<int> found{0};
  int stride = size(kAxes);
  for (const Axis axis : kAxes) {
    const int many = size(axis);
    stride /= many;
    std::vector<int> next;
    for (const int base : found) {
      if (!axes.has(axis)) {
        next.push_back(base + rank / stride % many * stride);
        continue;
      }
      for (int number = 0; number < many; ++number)
        next.push_back(base + number * stride);
    }
    found = std::move(next);
  }
  return found;
}

std::vector<Axes> MeshShape::groups() const {
  std::vector<Axes> found;
  for (const Axis axis : kAxes)
    if (size(axis) > 1) found.emplace_back(axis);
  if (size(Axis::DpShard) > 1 && size(Axis::Sp) > 1) found.push_back(kStateAxes);
  return found;
}

MeshShape mesh_shape(int world, int shards, int sp, int tp) {
  TESSERA_CHECK_VALUE(world >= 1, "comm.mesh", "a mesh has at least one rank, not ", world);
  TESSERA_CHECK_VALUE(sp >= 1 && tp >= 1 && world % (sp * tp) == 0, "comm.mesh", "sequence_parallel_size ", sp,
                      " x tensor_parallel.autotp_size ", tp, " does not divide the ", world,
                      " ranks: start a multiple of ", sp * tp, ", or lower the two");
  const int batch = world / (sp * tp);
  if (shards <= 0) shards = batch;
  TESSERA_CHECK_VALUE(batch % shards == 0, "comm.mesh", "the ", batch,
                      " data-parallel ranks are not a multiple of the ranks of a shard group "
                      "(zero_optimization.mics_shard_size), ",
                      shards);
  return {{batch / shards, shards, sp, tp}};
}

void check_sizes(const Mesh& mesh, int64_t sp, int64_t tp) {
  const auto check = [&](Axis axis, int64_t ranks, const char* key) {
    TESSERA_CHECK_VALUE(ranks <= 1 || mesh.size(axis) == ranks, "initialize", key, " is ", ranks, ", but the mesh has ",
                        mesh.size(axis), " ranks along '", axis_name(axis), "'");
  };
  check(Axis::Sp, sp, "sequence_parallel_size");
  check(Axis::Tp, tp, "tensor_parallel.autotp_size");
}

std::string asked_text(int shards, int sp, int tp) {
  return c10::str("zero_optimization.mics_shard_size ", shards > 0 ? shards : -1, ", sequence_parallel_size ", sp,
                  ", tensor_parallel.autotp_size ", tp);
}

void check_asked(const std::vector<std::string>& asked) {
  for (size_t rank = 1; rank < asked.size(); ++rank) {
    std::istringstream first(asked[0]), other(asked[rank]);
    std::string a, b;
    while (std::getline(first, a, ',') && std::getline(other, b, ','))
      TESSERA_CHECK_VALUE(a == b, "comm.mesh", "ranks ask for different meshes: rank 0 has ", a.substr(a[0] == ' '),
                          ", rank ", rank, " has ", b.substr(b[0] == ' '), "; give all ranks the same configuration");
  }
}

void check_asked(Group& group, c10::Device device, int shards, int sp, int tp) {
  if (group.size() == 1) return;
  at::Tensor all = at::zeros({group.size(), 3}, at::kLong);
  all[group.rank()].copy_(at::tensor({shards, sp, tp}, at::kLong));
  at::Tensor travelling = all.to(device);
  group.all_gather(travelling.flatten(), travelling[group.rank()].flatten(), "sizes of a mesh").wait();
  all = travelling.cpu();
  std::vector<std::string> asked;
  for (int rank = 0; rank < group.size(); ++rank) {
    const at::Tensor row = all[rank];
    const auto number = [&](int i) { return static_cast<int>(row[i].item<int64_t>()); };
    asked.push_back(asked_text(number(0), number(1), number(2)));
  }
  check_asked(asked);
}

Mesh::Mesh() : single_(single_group()) {}

Mesh::Mesh(GroupPtr dp_shard) : Mesh() {
  set(Axis::DpShard, std::move(dp_shard));
}

Mesh& Mesh::set(Axes axes, GroupPtr group) {
  check_live(single_);
  TESSERA_CHECK_VALUE(group != nullptr, "comm.mesh", "the group of axis '", axes.name(), "' is null");
  const bool several = !(axes == Axes(Axis::DpReplicate) || axes == Axes(Axis::DpShard) || axes == Axes(Axis::Sp) ||
                         axes == Axes(Axis::Tp));
  TESSERA_CHECK_VALUE(!several || (group->size() == size(axes) && group->rank() == rank(axes)), "comm.mesh",
                      "the group of axes '", axes.name(), "' has this rank as ", group->rank(), " of ", group->size(),
                      ", its axes say ", rank(axes), " of ", size(axes));
  groups_[axes] = std::move(group);
  return *this;
}

// Axes of one rank do not count.
const GroupPtr& Mesh::group(Axes axes) const {
  check_live(single_);
  if (const auto found = groups_.find(axes); found != groups_.end()) return found->second;
  for (const Axis axis : kAxes) {
    const auto found = groups_.find(axis);
    const bool alone = found == groups_.end() || found->second->size() == 1;
    if (axes.has(axis) && alone) return axes == Axes(axis) ? single_ : group(axes.without(axis));
  }
  if (axes.empty()) return single_;
  TESSERA_CHECK_VALUE(false, "comm.mesh", "there is no group along '", axes.name(), "' together; set one");
}

int Mesh::size(Axes axes) const {
  int product = 1;
  for (const Axis axis : kAxes)
    if (axes.has(axis)) product *= group(axis)->size();
  return product;
}

int Mesh::rank(Axes axes) const {
  int number = 0;
  for (const Axis axis : kAxes)
    if (axes.has(axis)) number = number * group(axis)->size() + group(axis)->rank();
  return number;
}

}  // namespace tessera::comm

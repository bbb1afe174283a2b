// Mesh: the ranks of one engine on ordered, named axes, and the groups along sets of them. "axis" is for meshes; "dim" is
// for tensors.
//
// Note [Batch, state and model ranks]
//   Ranks share three things, and an axis says which of them:
//                   its own batch   a slice of the states   a slice of the model
//     dp_replicate        x
//     dp_shard            x                   x
//     sp                  (of the sequence)   x
//     tp                                                            x
//   Batch ranks (kBatchAxes) are what samplers and batch sizes count; states are cut along kStateAxes; ranks along
//   kModelAxes agree on what a step does and exchange neither gradients nor states.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm {

// Axes in the order of a mesh: ranks that are neighbours along the last one have neighbouring numbers.
enum class Axis : uint8_t { DpReplicate, DpShard, Sp, Tp };
inline constexpr std::initializer_list<Axis> kAxes{Axis::DpReplicate, Axis::DpShard, Axis::Sp, Axis::Tp};
const char* axis_name(Axis axis);

// A set of axes.
class Axes {
 public:
  constexpr Axes() = default;
  constexpr Axes(Axis axis) : bits_(bit(axis)) {}  // NOLINT(google-explicit-constructor): an axis is a set of one
  constexpr Axes(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes)
      bits_ |= bit(axis);
  }
  constexpr bool has(Axis axis) const { return (bits_ & bit(axis)) != 0; }
  constexpr Axes with(Axes others) const { return Axes(static_cast<uint8_t>(bits_ | others.bits_)); }
  constexpr Axes only(Axes others) const { return Axes(static_cast<uint8_t>(bits_ & others.bits_)); }
  constexpr Axes without(Axes others) const { return Axes(static_cast<uint8_t>(bits_ & ~others.bits_)); }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr auto operator<=>(const Axes&) const = default;
  std::string name() const;  // as "dp_shard x sp"

 private:
  constexpr explicit Axes(uint8_t bits) : bits_(bits) {}
  static constexpr uint8_t bit(Axis axis) { return static_cast<uint8_t>(1U << static_cast<unsigned>(axis)); }
  uint8_t bits_ = 0;
};

inline constexpr Axes kBatchAxes{Axis::DpReplicate, Axis::DpShard};
inline constexpr Axes kStateAxes{Axis::DpShard, Axis::Sp};
inline constexpr Axes kModelAxes{Axis::Tp};

// How many ranks lie along each axis, and who they are: rank r of a mesh has the coordinates of r written in mixed radix,
// the last axis fastest. Example: 2 x dp_shard, 3 x tp: rank 4 is number 1 along dp_shard and number 1 along tp.
struct MeshShape {
  std::array<int, 4> sizes{1, 1, 1, 1};  // by axis

  int size(Axes axes) const;
  // The ranks that differ from `rank` along these axes only, ascending.
  std::vector<int> ranks_along(Axes axes, int rank) const;
  // The sets of axes that an engine has groups along: every axis of several ranks, and the axes of model states together.
  std::vector<Axes> groups() const;
};
// The shape of `world` ranks with so many along sp and tp. `shards` > 0: so many of the others share model states, and the rest
// replicate them; otherwise all others share. Value error where the numbers do not divide.
MeshShape mesh_shape(int world, int shards = -1, int sp = 1, int tp = 1);

// Compares what ranks ask of a mesh, by rank: "key size, key size, ...", with the same keys. Value error that names the first one
// that differs.
void check_asked(const std::vector<std::string>& asked);
// Compares what mesh_shape() takes, under the keys of a configuration, on all ranks. Collective over `group`, where no group
// along an axis has been made yet: ranks that ask for another mesh would wait for each other there.
void check_asked(Group& group, c10::Device device, int shards, int sp, int tp);
std::string asked_text(int shards, int sp, int tp);

// Groups are handed in; an axis that is not set has one rank. Immutable once built.
class Mesh {
 public:
  Mesh();
  explicit Mesh(GroupPtr dp_shard);
  // This rank's group along one axis, or along several together, its ranks numbered in the order of the mesh. Set single
  // axes first. Value error when `group` is null, or has another size or rank than the axes say.
  Mesh& set(Axes axes, GroupPtr group);

  // This rank's group along the axes: of one rank for axes that were not set. Value error, which names the axes, where several of
  // them have more than one rank and nobody set their group.
  const GroupPtr& group(Axes axes) const;
  // How many ranks there are along the axes together, and this one's place among them.
  int size(Axes axes) const;
  int rank(Axes axes) const;

 private:
  std::map<Axes, GroupPtr> groups_;
  GroupPtr single_;
};

// Value error, by the keys of a configuration, where `sp` or `tp` > 1 is not what a mesh that was given has along that axis.
void check_sizes(const Mesh& mesh, int64_t sp, int64_t tp);

}  // namespace tessera::comm

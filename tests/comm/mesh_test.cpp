#include "tessera/comm/mesh.h"

#include <functional>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

TEST(Mesh, AnAxisThatWasNotSetHasOneRank) {
  const Mesh mesh;
  for (const auto axis : {Axis::DpReplicate, Axis::DpShard, Axis::Sp, Axis::Tp}) {
    EXPECT_EQ(mesh.size(axis), 1);
    EXPECT_EQ(mesh.rank(axis), 0);
    EXPECT_EQ(mesh.group(axis), mesh.group(axis));
  }
}

TEST(Mesh, HoldsOneGroupPerAxis) {
  const auto shard = thread_groups(4), tensor = thread_groups(2);
  Mesh mesh(shard[3]);
  mesh.set(Axis::Tp, tensor[1]);
  EXPECT_EQ(mesh.group(Axis::DpShard), shard[3]);
  EXPECT_EQ(mesh.size(Axis::DpShard), 4);
  EXPECT_EQ(mesh.rank(Axis::DpShard), 3);
  EXPECT_EQ(mesh.size(Axis::Tp), 2);
  EXPECT_EQ(mesh.size(Axis::Sp), 1);
}

TEST(Mesh, HasGroupsOverSetsOfAxes) {
  const auto shard = thread_groups(2), sequence = thread_groups(3), both = thread_groups(6);
  Mesh mesh(shard[1]);
  EXPECT_EQ(mesh.group(kStateAxes), shard[1]);  // the other axis has one rank
  mesh.set(Axis::Sp, sequence[2]);
  const auto missing = testing::message_of<c10::ValueError>([&] { mesh.group(kStateAxes); });
  EXPECT_HAS(missing, "'dp_shard x sp'");
  const auto wrong = testing::message_of<c10::ValueError>([&] { mesh.set(kStateAxes, both[2]); });
  EXPECT_HAS(wrong, "as 2 of 6, its axes say 5 of 6");
  mesh.set(kStateAxes, both[5]);
  EXPECT_EQ(mesh.group(kStateAxes), both[5]);
  EXPECT_EQ(mesh.group({Axis::DpShard, Axis::Tp}), shard[1]);
  EXPECT_EQ(mesh.size(kBatchAxes), 2);
  EXPECT_EQ(mesh.rank(kStateAxes), 5);
}

TEST(Mesh, RefusesNull) {
  const auto text = testing::message_of<c10::ValueError>([] { Mesh().set(Axis::Sp, nullptr); });
  EXPECT_HAS(text, "'sp'");
}

TEST(Mesh, WhatWasMovedFromSaysSo) {
  Mesh mesh(thread_groups(1)[0]);
  const Mesh other = std::move(mesh);
  EXPECT_EQ(other.size(kAxes), 1);
  for (const auto& call : std::vector<std::function<void()>>{[&] { mesh.size(kAxes); }, [&] { mesh.rank(Axis::Sp); },
                                                             [&] { mesh.group(Axis::DpShard); },
                                                             [&] { mesh.set(Axis::Tp, single_group()); }})  // NOLINT
    EXPECT_HAS(testing::message_of<UsageError>(call), "[comm.mesh] this mesh was moved from");
  mesh = other;
  EXPECT_EQ(mesh.rank(kAxes), 0);
}

TEST(MeshShape, NumbersRanksWithTheLastAxisFastest) {
  const MeshShape shape = mesh_shape(24, 2, 3, 2);
  EXPECT_EQ(shape.sizes, (std::array{2, 2, 3, 2}));
  using Ranks = std::vector<int>;
  EXPECT_EQ(shape.ranks_along(Axis::Tp, 15), (Ranks{14, 15}));
  EXPECT_EQ(shape.ranks_along(Axis::Sp, 15), (Ranks{13, 15, 17}));
  EXPECT_EQ(shape.ranks_along(Axis::DpReplicate, 15), (Ranks{3, 15}));
  EXPECT_EQ(shape.ranks_along(kStateAxes, 15), (Ranks{13, 15, 17, 19, 21, 23}));
  EXPECT_EQ(shape.ranks_along({}, 15), (Ranks{15}));
  EXPECT_EQ(shape.groups().size(), 5);
  EXPECT_EQ(shape.groups().back(), kStateAxes);
  EXPECT_TRUE(mesh_shape(1).groups().empty());
  EXPECT_EQ(mesh_shape(8, -1, 1, 2).sizes, (std::array{1, 4, 1, 2}));
}

TEST(MeshShape, RefusesNumbersThatDoNotDivide) {
  const auto refused = [](int world, int shards, int sp, int tp) {
    return testing::message_of<c10::ValueError>([=] { mesh_shape(world, shards, sp, tp); });
  };
  EXPECT_HAS(refused(6, -1, 1, 4),
             "sequence_parallel_size 1 x tensor_parallel.autotp_size 4 does not divide the 6 ranks");
  for (const int world : {0, -3})
    EXPECT_HAS(refused(world, -1, 1, 1), "a mesh has at least one rank, not ");
  EXPECT_HAS(refused(8, 3, 1, 2), "the 4 data-parallel ranks are not a multiple of the ranks of a shard group");
}

TEST(Mesh, AxesHaveTheNamesOfTheConfiguration) {
  EXPECT_STREQ(axis_name(Axis::DpReplicate), "dp_replicate");
  EXPECT_STREQ(axis_name(Axis::DpShard), "dp_shard");
  EXPECT_STREQ(axis_name(Axis::Sp), "sp");
  EXPECT_STREQ(axis_name(Axis::Tp), "tp");
}

}  // namespace
}  // namespace tessera::comm

#include "tessera/comm/mesh.h"

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

TEST(Mesh, RefusesNull) {
  const auto text = testing::message_of<c10::ValueError>([] { Mesh().set(Axis::Sp, nullptr); });
  EXPECT_HAS(text, "'sp'");
}

TEST(Mesh, AxesHaveTheNamesOfTheConfiguration) {
  EXPECT_STREQ(axis_name(Axis::DpReplicate), "dp_replicate");
  EXPECT_STREQ(axis_name(Axis::DpShard), "dp_shard");
  EXPECT_STREQ(axis_name(Axis::Sp), "sp");
  EXPECT_STREQ(axis_name(Axis::Tp), "tp");
}

}  // namespace
}  // namespace tessera::comm

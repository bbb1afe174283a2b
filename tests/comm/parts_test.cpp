// Parts of a program and their p2p: ranks as threads, and as processes over both transports.
#include "tessera/comm/parts.h"

#include <csignal>
#include <thread>

#include "tests/comm/collectives.h"
#include "tests/comm/process_ranks.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::in_ranks;
using testing::message_of;

const std::vector<MeshShape>& two_and_one() {
  static const std::vector<MeshShape> shapes{mesh_shape(2), mesh_shape(1)};
  return shapes;
}

// Messages of several tags and sizes, asked for in another order than sent, while nobody waits in a send.
void exchange(const Parts& parts) {
  const int me = parts.everyone->rank(), world = parts.everyone->size();
  const auto value = [](int from, int tag) { return at::full({tag == 2 ? 1'500'000 : 3}, 10 * from + tag); };
  for (const int tag : {0, 1, 2})
    for (int peer = 0; peer < world; ++peer)
      if (peer != me) parts.p2p->send(value(me, tag), peer, tag, "numbers");
  for (const int tag : {2, 0, 1}) {
    for (int peer = 0; peer < world; ++peer) {
      if (peer == me) continue;
      const at::Tensor got = at::empty_like(value(peer, tag));
      parts.p2p->receive(got, peer, tag, "numbers");
      EXPECT_TRUE(at::equal(got, value(peer, tag)));
    }
  }
  parts.p2p->flush();
}

void check_places(const Parts& parts, int rank) {
  EXPECT_EQ(parts.everyone->rank(), rank);
  EXPECT_EQ(parts.part, rank / 2);
  EXPECT_EQ(parts.place(), rank % 2);
  EXPECT_EQ(parts.rank_of(1, 0), 2);
  EXPECT_EQ(parts.mesh.size(Axis::DpShard), rank < 2 ? 2 : 1);
  at::Tensor one = at::ones({1});
  parts.mesh.group(Axis::DpShard)->all_reduce(one, ReduceOp::Sum).wait();
  EXPECT_EQ(one.item<float>(), rank < 2 ? 2 : 1);
}

TEST(Parts, RanksAsThreads) {
  const auto parts = thread_parts(two_and_one(), 30s);
  std::vector<GroupPtr> groups;
  for (const Parts& each : parts)
    groups.push_back(each.everyone);
  testing::run_threads(groups, [&](int rank, const GroupPtr&) {
    check_places(parts[rank], rank);
    exchange(parts[rank]);
  });
}

void in_processes(const testing::Environment& env) {
  if (!in_ranks({3}, env)) return;
  const Parts parts = environment_parts(two_and_one(), 1min);
  check_places(parts, std::stoi(std::getenv("RANK")));
  exchange(parts);
  parts.everyone->barrier();
}
TEST(Parts, RanksAsProcessesOverSharedMemory) {
  in_processes(testing::kShared);
}
TEST(Parts, RanksAsProcessesOverGloo) {
  in_processes(testing::kGloo);
}

// Two parts that both ranks have, each in its own shape.
void check_overlaid(const std::vector<Parts>& parts, int rank) {
  ASSERT_EQ(parts.size(), 2u);
  for (int part = 0; part < 2; ++part) {
    EXPECT_EQ(parts[part].part, part);
    EXPECT_EQ(parts[part].place(), rank);
    EXPECT_EQ(parts[part].rank_of(1 - part, 1), 1);
    EXPECT_EQ(parts[part].mesh.size(Axis::Tp), part == 0 ? 1 : 2);
    EXPECT_EQ(parts[part].mesh.rank(part == 0 ? Axis::DpShard : Axis::Tp), rank);
  }
  exchange(parts[1]);
}

TEST(Parts, EveryPartOnAllRanks) {
  const std::vector<MeshShape> shapes{mesh_shape(2), mesh_shape(2, -1, 1, 2)};
  if (testing::is_rank()) return check_overlaid(environment_overlaid_parts(shapes), std::stoi(std::getenv("RANK")));
  const auto parts = thread_overlaid_parts(shapes, {}, 30s);
  std::vector<GroupPtr> groups{parts[0][0].everyone, parts[1][0].everyone};
  testing::run_threads(groups, [&](int rank, const GroupPtr&) { check_overlaid(parts[rank], rank); });
  for (const auto& env : {testing::kShared, testing::kGloo})
    testing::expect_success(testing::run_processes(2, env));
  EXPECT_HAS(message_of<c10::ValueError>([&] { environment_overlaid_parts(shapes); }),
             "must have 1 ranks each, got one");
}

TEST(Parts, ALostRankIsNamedByWhoWaitsForIt) {
  if (!in_ranks({3}, {}, /*lost=*/2)) return;
  const Parts parts = environment_parts(two_and_one(), 1min);
  parts.everyone->barrier();
  testing::leave_mark("met");
  if (parts.part == 1) testing::die_once_all_have_met();
  const at::Tensor t = at::empty({3});
  const auto text = message_of<c10::DistBackendError>([&] { parts.p2p->receive(t, 2, 0, "numbers"); });
  EXPECT_HAS(text, "receive from rank 2 (numbers, 12 B) failed");
  testing::leave_mark("told");
  EXPECT_TRUE(testing::await_marks("told", {0, 1}));
}

TEST(Parts, NamesWhatIsWrong) {
  EXPECT_HAS(message_of<c10::ValueError>([] { environment_parts(two_and_one()); }),
             "the parts of the program have 3 ranks in all, but WORLD_SIZE is 1");
  const auto p2p = thread_point_to_point(2, 1s);
  EXPECT_HAS(message_of<c10::ValueError>([&] { p2p[0]->send(at::ones({2}), 0, 0, "x"); }), "rank 0 of 2 has no rank 0");
  EXPECT_HAS(message_of<c10::ValueError>([&] { p2p[0]->send(at::ones({2}), 1, -1, "x"); }), "a tag must be >= 0");
  EXPECT_HAS(message_of<c10::ValueError>([&] { p2p[0]->receive(at::ones({2, 2}).t(), 1, 0, "x"); }), "contiguous");
}

}  // namespace
}  // namespace tessera::comm

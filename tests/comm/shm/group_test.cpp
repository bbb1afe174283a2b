// Ranks over shared memory: threads of this process, and processes.
#include "tessera/comm/shm/group.h"

#include <csignal>

#include "tessera/comm/backends.h"
#include "tests/comm/collectives.h"
#include "tests/comm/process_ranks.h"
#include "tests/comm/shared_files.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::await_marks;
using testing::in_ranks;
using testing::kShared;
using testing::leave_mark;
using testing::message_of;
using testing::same_bits;
using testing::shared_files;

using Body = std::function<void(int, GroupPtr)>;

void run_shm(int size, const Body& body, std::chrono::milliseconds timeout = 2min) {
  testing::run_threads(shm_thread_groups(size, timeout), body);
}

class ShmGroup : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmGroup, ::testing::Values(2, 3, 4, 5, 8));

// Three groups at once, from a thread each: all ranks, all ranks again, pairs of them. 10,000 calls in all.
TEST(ShmGroups, TenThousandRandomCollectivesInSeveralGroups) {
  const int size = 4;
  std::vector<std::vector<GroupPtr>> pairs = {shm_thread_groups(2, 2min), shm_thread_groups(2, 2min)};
  run_shm(size, [&](int rank, GroupPtr group) {
    const GroupPtr pair = std::move(pairs[rank / 2][rank % 2]), sibling = group->sibling();
    std::thread second([&] { testing::random_collectives(*sibling, 3000, 52, 300007, 300); });
    std::thread third([&] { testing::random_collectives(*pair, 4000, 53, 600011, 300); });
    testing::random_collectives(*group, 3000, 51, 500009, 300);
    second.join();
    third.join();
  });
}

TEST_P(ShmGroup, LargeTensorsFlowThroughTheRing) {
  run_shm(GetParam(), [](int, GroupPtr group) {
    for (const int kind : {0, 1, 2, 3, 4}) {
      auto l = testing::launch_call(*group, kind + 1, kind, 1200001 / group->size(), at::kDouble, ReduceOp::Sum, true);
      l.pending.wait();
      EXPECT_TRUE(same_bits(l.got, l.want)) << kind;
    }
  });
}

TEST(ShmGroups, MayHaveOneRankOrMany) {
  EXPECT_THROW(shm_thread_groups(0, 1s), c10::ValueError);
  for (const int size : {1, 16})
    run_shm(size, [](int, GroupPtr group) { testing::random_collectives(*group, 40, 12, 5000); });
}

// ---- processes

TEST(ShmGroups, AnUnknownTransportIsRefused) {
  setenv("TESSERA_TRANSPORT", "pigeon", 1);
  EXPECT_HAS(message_of<c10::ValueError>([] { environment_group(); }),
             "[comm] TESSERA_TRANSPORT is 'pigeon'; it may be auto, gloo or shared_memory");
  unsetenv("TESSERA_TRANSPORT");
}

// in_ranks() that leave no files behind, however they end.
bool in_tidy_ranks(const std::vector<int>& sizes, int lost = -1) {
  const auto before = shared_files();
  const bool in_rank = in_ranks(sizes, kShared, lost);
  EXPECT_TRUE(in_rank || shared_files() == before);
  return in_rank;
}

TEST(ShmGroups, ProcessesGetTheBitsOfTheReference) {
  if (!in_tidy_ranks({2, 4})) return;
  const auto group = environment_group(60s);
  EXPECT_EQ(group->name(), "shared memory");
  testing::random_collectives(*group, 400, 21, 20011);
  const auto sibling = group->sibling();
  testing::random_collectives(*sibling, 50, 22, 200011);
}

TEST(ShmGroups, AProcessMayHaveSeveral) {
  if (in_ranks({2}, kShared)) testing::use_two_groups(/*meet=*/false);
}

constexpr auto kGone = "lost rank 2: its process ";

TEST(ShmGroups, SurvivorsNameARankKilledBeforeACollective) {
  if (in_tidy_ranks({3}, /*lost=*/2)) testing::lose_rank_2(/*inside=*/false, kGone);
}

TEST(ShmGroups, SurvivorsNameARankKilledInsideACollective) {
  if (in_tidy_ranks({3}, /*lost=*/2)) testing::lose_rank_2(/*inside=*/true, kGone);
}

TEST(ShmGroups, SurvivorsNameARankKilledWhileAllSleep) {
  if (!in_tidy_ranks({3}, /*lost=*/2)) return;
  const auto group = environment_group(60s);
  group->barrier();
  if (group->rank() == 2) {
    std::thread killer([] {
      await_marks("asleep", {0, 1});
      raise(SIGKILL);
    });
    group->sibling()->barrier("nobody else comes");
    return killer.join();
  }
  leave_mark("asleep");  // or soon
  const auto text = message_of<c10::DistBackendError>([&] { group->barrier("a"); });
  testing::expect_lost_rank_2(text, "barrier (a, 0 B)", kGone);
}

TEST(ShmGroups, AnAbortReachesOtherProcesses) {
  if (!in_ranks({3}, kShared)) return;
  const auto group = environment_group(60s);
  group->barrier();
  leave_mark("met");
  if (group->rank() == 1) {
    EXPECT_TRUE(await_marks("met", {0, 2}));
    group->abort("the loss is NaN");
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier(); }), "rank 1 aborted: the loss is NaN");
    return;
  }
  auto t = at::ones({1000});
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->all_reduce(t, ReduceOp::Avg, "loss").wait(); }),
             "rank 1 aborted: the loss is NaN");
}

TEST(ShmGroups, ALateRankFailsTheOthersAtTheTimeoutAndItselfWithTheFirstCause) {
  if (!in_ranks({2}, kShared)) return;
  leave_mark("started");
  EXPECT_TRUE(await_marks("started", {0, 1}));
  const auto group = environment_group(5s);
  group->barrier();
  if (group->rank() == 1) {
    EXPECT_TRUE(await_marks("told", {0}));
  }
  const auto text = message_of<c10::DistBackendError>([&] { group->barrier("step"); });
  EXPECT_HAS(text, "rank 0 in barrier (step, 0 B) timed out after 5.0 s waiting for rank(s) 1 (alive");
  leave_mark("told");
}

}  // namespace
}  // namespace tessera::comm

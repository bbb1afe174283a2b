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

TEST_P(ShmGroup, RandomCollectivesInFlight) {
  run_shm(GetParam(), [](int, GroupPtr group) { testing::random_collectives(*group, 300, 11, 20011); });
}

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

TEST_P(ShmGroup, GivesTheBitsOfTheThreadGroup) {
  const int size = GetParam();
  for (const int64_t n : {300, 40000, 1300000}) {
    std::vector<at::Tensor> want(size), got(size);
    testing::run_ranks(size, [&](int rank, GroupPtr group) {
      want[rank] = testing::input(1, rank, n, at::kBFloat16);
      group->all_reduce(want[rank], ReduceOp::Avg).wait();
    });
    run_shm(size, [&](int rank, GroupPtr group) {
      got[rank] = testing::input(1, rank, n, at::kBFloat16);
      auto parts = got[rank].narrow(0, 0, n / size * size).clone(), part = at::empty({n / size}, at::kBFloat16);
      group->all_reduce(got[rank], ReduceOp::Avg).wait();
      group->reduce_scatter(part, parts, ReduceOp::Avg).wait();
      EXPECT_TRUE(same_bits(part, got[rank].narrow(0, rank * (n / size), n / size).clone()));
    });
    for (int rank = 0; rank < size; ++rank)
      EXPECT_TRUE(same_bits(want[rank], got[rank]));
  }
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

TEST(ShmGroups, LaunchingDoesNotBlockHoweverMuchIsInFlight) {
  run_shm(2, [](int rank, GroupPtr group) {
    std::vector<at::Tensor> data;
    std::vector<Pending> pending;
    for (int i = 0; i < 100; ++i) {
      data.push_back(at::full({100000 + i}, 1.0f + rank));
      pending.push_back(group->all_reduce(data.back(), ReduceOp::Sum, "x"));
    }
    for (Pending& p : pending)
      p.wait();
    for (const at::Tensor& t : data)
      EXPECT_TRUE(t.eq(3).all().item<bool>());
  });
}

TEST(ShmGroups, ARankThatHasLaunchedDoesNotHoldUpTheOthers) {
  const auto groups = shm_thread_groups(2, 2min);
  auto x = at::ones({10}), y = at::ones({20});
  auto mine = groups[0]->all_gather(y, x);
  std::thread other([&] {
    auto z = at::ones({20}), mine = at::ones({10});
    groups[1]->all_gather(z, mine).wait();
  });
  other.join();  // ends although rank 0 has not waited yet
  mine.wait();
}

TEST(ShmGroups, SiblingsMayBeLaunchedAndWaitedForInAnyOrder) {
  run_shm(2, [](int rank, GroupPtr group) {
    const auto sibling = group->sibling();
    const int64_t n = 5000000;  // more than a ring holds
    at::Tensor a = at::full({n}, 1.0f + rank), b = at::full({n}, 10.0f + rank);
    auto first = rank == 0 ? group->all_reduce(a, ReduceOp::Sum, "a") : sibling->all_reduce(b, ReduceOp::Sum, "b");
    auto second = rank == 0 ? sibling->all_reduce(b, ReduceOp::Sum, "b") : group->all_reduce(a, ReduceOp::Sum, "a");
    first.wait();
    second.wait();
    EXPECT_TRUE(a.eq(3).all().item<bool>());
    EXPECT_TRUE(b.eq(21).all().item<bool>());
    EXPECT_EQ(group->stats().all_reduce.calls, 2);
  });
}

TEST(ShmGroups, DifferentCallsAreNamedOnAllRanks) {
  run_shm(3, [](int rank, GroupPtr group) {
    const auto text = message_of<c10::DistBackendError>([&] {
      auto whole = at::ones({1200}), part = at::ones({400});
      (rank < 2 ? group->all_gather(whole, part, "unit x") : group->all_gather(whole, part, "unit y")).wait();
    });
    EXPECT_HAS(text, "called all_gather (unit x, 4800 B, Float), rank 2 called all_gather (unit y, 4800 B, Float)");
  });
}

TEST(ShmGroups, AWaitCycleIsNamed) {
  for (const int size : {2, 3})
    run_shm(size, [](int, GroupPtr group) { testing::expect_cycle(*group); });
  run_shm(2, [](int, GroupPtr group) { testing::expect_no_cycle(*group, 2500ms); });
}

TEST(ShmGroups, AbortReachesTheOthersWithItsReason) {
  run_shm(3, [](int rank, GroupPtr group) {
    auto t = at::ones({8});
    if (rank == 2) return group->abort("disk on fire");
    const auto text = message_of<c10::DistBackendError>([&] { group->all_reduce(t, ReduceOp::Sum, "b").wait(); });
    EXPECT_HAS(text, "[comm] rank " + std::to_string(rank) + " of 3: all_reduce (b, 32 B) failed");
    EXPECT_HAS(text, "rank 2 aborted: disk on fire");
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier("later"); }), "disk on fire");
  });
}

TEST(ShmGroups, ADestroyedGroupFailsThoseWhoWaitForIt) {
  run_shm(2, [](int rank, GroupPtr group) {
    group->barrier();
    if (rank == 1) return;  // the group dies with the thread
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier("second"); }), "rank 1 destroyed its group");
  });
}

TEST(ShmGroups, HandlesMayOutliveTheGroupAndMayBeDropped) {
  run_shm(2, [](int, GroupPtr group) {
    auto t = at::ones({50000}), u = at::ones({50000});
    auto pending = group->all_reduce(t, ReduceOp::Sum);
    {
      auto dropped = group->all_reduce(u, ReduceOp::Sum);
    }
    group.reset();
    pending.wait();
    EXPECT_TRUE(t.eq(2).all().item<bool>());
    EXPECT_TRUE(u.eq(2).all().item<bool>());
  });
}

TEST(ShmGroups, TakeParametersThatRequireGrad) {
  run_shm(2, [](int rank, GroupPtr group) {
    auto parameter = at::full({30000}, static_cast<float>(rank)).requires_grad_();
    const auto version = parameter._version();
    group->broadcast(parameter, 1).wait();
    EXPECT_EQ(parameter.detach().sum().item<float>(), 30000.0f);
    EXPECT_EQ(parameter._version(), version);
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

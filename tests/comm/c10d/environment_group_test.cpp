// Ranks as processes over Gloo.
#include <csignal>
#include <thread>

#include "tests/comm/collectives.h"
#include "tests/comm/process_ranks.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::await_marks;
using testing::die_once_all_have_met;
using testing::expect_success;
using testing::in_ranks;
using testing::kGloo;
using testing::leave_mark;
using testing::message_of;
using testing::run_processes;

struct Environment {
  explicit Environment(std::vector<std::pair<const char*, const char*>> values) : values_(std::move(values)) {
    for (const auto& [name, value] : values_)
      setenv(name, value, 1);
  }
  ~Environment() {
    for (const auto& [name, value] : values_)
      unsetenv(name);
  }
  std::vector<std::pair<const char*, const char*>> values_;
};

TEST(EnvironmentGroup, IsSingleWithoutVariables) {
  EXPECT_EQ(environment_group()->name(), "single");
  const Environment env({{"WORLD_SIZE", "1"}, {"RANK", "0"}});
  EXPECT_EQ(environment_group()->size(), 1);
}

TEST(EnvironmentGroup, NamesWhatIsMissingOrWrong) {
  // All that there is to say: tests/comm/launch_test.cpp.
  const std::tuple<const char*, const char*, const char*, const char*> wrong[] = {
      {"2", "2", "1", "RANK is 2, but WORLD_SIZE is 2"},
      {"", "1", "1", "WORLD_SIZE is not set"},
      {"2", "0", "65536", "MASTER_PORT is '65536'; it must be a port"},
  };
  for (const auto& [size, rank, port, want] : wrong) {
    const Environment env({{"WORLD_SIZE", size}, {"RANK", rank}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
    for (const char* name : {"WORLD_SIZE", "RANK"}) {
      if (*std::getenv(name) == 0) unsetenv(name);
    }
    EXPECT_HAS(message_of<c10::ValueError>([] { environment_mesh(0); }), want);
  }
}

TEST(EnvironmentGroup, NobodyThereIsADistributedErrorWithinTheTimeoutAndNothingIsPrinted) {
  const auto port = std::to_string(testing::free_port());
  const std::pair<const char*, std::string> rows[] = {
      {"127.0.0.1", "nobody listens at 127.0.0.1:" + port + " after 1 s"},
      {"localhost", "nobody listens at localhost:" + port},
      {"no-such-host.invalid", "no host is known by the name no-such-host.invalid"}};
  for (const auto& [address, why] : rows) {
    const Environment env(
        {{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_ADDR", address}, {"MASTER_PORT", port.c_str()}});
    ::testing::internal::CaptureStderr();
    const auto text = message_of<c10::DistBackendError>([] { environment_group(1500ms); });
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
    EXPECT_HAS(text,
               "[comm] rank 1 of 2 could not meet the others at " + std::string(address) + ":" + port + ": " + why);
  }
}

// Each in turn, also where it hosts the store.
TEST(EnvironmentGroup, RanksThatWaitForALateOnePrintNothing) {
  if (!testing::is_rank()) {
    for (const char* late : {"0", "1"}) {
      const auto results = run_processes(2, {{"TESSERA_TEST_LATE", late}});
      expect_success(results);
      for (const auto& result : results)
        EXPECT_EQ(result.output.find("c10d"), std::string::npos) << result.output;
    }
    return;
  }
  const bool late = std::getenv("TESSERA_TEST_LATE") == std::string(std::getenv("RANK"));
  if (late) std::this_thread::sleep_for(3s);
  environment_group(60s)->barrier();
}

// Several processes have one rank, so another is missing; or one just does not come.
TEST(EnvironmentGroup, TwoProcessesOfOneRankAreNamed) {
  if (!testing::is_rank()) {
    for (const char* which : {"0", "1"}) {
      const auto results = run_processes(3, {{"TESSERA_TEST_TWICE", which}});
      expect_success(results);
      for (const auto& result : results)
        EXPECT_LT(result.seconds, 45);
    }
    return;
  }
  const int number = std::stoi(std::getenv("RANK")), twice = std::stoi(std::getenv("TESSERA_TEST_TWICE"));
  leave_mark("started");
  EXPECT_TRUE(await_marks("started", {0, 1, 2}));
  if (number == 2) setenv("RANK", std::to_string(twice).c_str(), 1);
  std::string text;
  try {
    environment_group(60s);
  } catch (const std::exception& error) {
    text = error.what();
  }
  EXPECT_HAS(text, " of one host both have RANK " + std::to_string(twice));
  leave_mark("told" + std::to_string(number));
  for (const int other : {0, 1, 2}) {
    while (!std::filesystem::exists(testing::mark_path("told" + std::to_string(other), other == 2 ? twice : other)))
      std::this_thread::sleep_for(10ms);
  }
}

TEST(EnvironmentGroup, ARankThatDoesNotComeIsNamed) {
  if (!in_ranks({2}, {{"WORLD_SIZE", "3"}})) return;
  const auto text = message_of<c10::DistBackendError>([] { environment_group(5s); });
  EXPECT_HAS(text, "could not meet the others at 127.0.0.1:");
  EXPECT_HAS(text, "rank(s) 2 did not come within 5 s, rank(s) 0, 1 did");
  leave_mark("told");
  EXPECT_TRUE(await_marks("told", {0, 1}));
}

TEST(EnvironmentGroup, ProcessesGetTheBitsOfTheReference) {
  if (!in_ranks({2, 4}, kGloo)) return;
  const auto group = environment_group(60s);
  EXPECT_EQ(group->name(), "gloo");
  testing::random_collectives(*group, 100, 21, 20011);
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max}) {
    for (const int kind : {0, 1, 2, 3, 4}) {
      auto l = testing::launch_call(*group, 900 + kind, kind, 100003, at::kBFloat16, op, true);
      l.pending.wait();
      EXPECT_TRUE(testing::same_bits(l.got, l.want)) << kind;
    }
  }
  group->barrier();
}

TEST(EnvironmentGroup, SharesMemoryOnOneHostUnlessConfiguredOtherwise) {
  if (!in_ranks({2})) return;
  EXPECT_EQ(environment_group(60s)->name(), "shared memory");
}

GroupPtr group_on_two_hosts() {
  setenv("TESSERA_HOST_ID", std::stoi(std::getenv("RANK")) < 2 ? "a" : "b", 1);
  auto group = environment_group(60s);
  EXPECT_EQ(group->name(), "shared memory and gloo");
  return group;
}

TEST(EnvironmentGroup, SharesMemoryWithinHostsAndTalksBetweenThem) {
  if (!in_ranks({3, 4})) return;
  const auto group = group_on_two_hosts();
  testing::random_collectives(*group, 100, 23, 20011);
  const auto sibling = group->sibling();
  testing::random_collectives(*sibling, 20, 24, 20011);
  group->barrier();
}

// Rank 3 shares a host with rank 2 only.
TEST(EnvironmentGroup, SurvivorsOfAllHostsNameAKilledRank) {
  if (!in_ranks({4}, {}, /*lost=*/3)) return;
  const auto group = group_on_two_hosts();
  group->barrier();
  leave_mark("met");
  if (group->rank() == 3) {
    EXPECT_TRUE(await_marks("met", {0, 1, 2}));
    raise(SIGKILL);
  }
  auto t = at::ones({100000});
  const auto text = message_of<c10::DistBackendError>([&] { group->all_reduce(t, ReduceOp::Sum, "unit 'a'").wait(); });
  EXPECT_HAS(text, "[comm] rank " + std::to_string(group->rank()) + " of 4: all_reduce (unit 'a', 400000 B) failed");
  EXPECT_HAS(text, "lost rank 3");
  leave_mark("told");
  EXPECT_TRUE(await_marks("told", {0, 1, 2}));
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier("later"); }), "lost rank 3");
}

TEST(EnvironmentGroup, AProcessMayHaveSeveral) {
  if (testing::is_rank()) return testing::use_two_groups(/*meet=*/true);
  expect_success(run_processes(2, kGloo));
  expect_success(run_processes(2, {{"TESSERA_TRANSPORT", "gloo"}, {"GLOO_SOCKET_IFNAME", "lo"}}));
}

// Rank 1 comes to rank 0's store for the second group while rank 0 still has the first, its only user until then.
TEST(EnvironmentGroup, AProcessMayHaveOneAfterAnother) {
  if (!testing::is_rank()) {
    for (const auto& env : {kGloo, testing::kShared})
      expect_success(run_processes(2, env));
    return;
  }
  auto group = environment_group(10s);
  const int rank = group->rank();
  group->barrier();
  if (rank == 0) std::this_thread::sleep_for(300ms);
  for (int i = 0; i < 5; ++i) {
    group.reset();
    group = environment_group(10s);
    auto t = at::ones({3});
    group->all_reduce(t, ReduceOp::Sum).wait();
    EXPECT_EQ(t.sum().item<float>(), 6.0F);
  }
  group->barrier();
}

TEST(EnvironmentMesh, ConsecutiveRanksShareAndTheOthersReplicate) {
  if (!in_ranks({4}, kGloo)) return;
  const auto mesh = environment_mesh(2, 1, 1, 60s);
  const int rank = std::stoi(std::getenv("RANK"));
  EXPECT_EQ(mesh.size(kBatchAxes), 4);
  EXPECT_EQ(mesh.rank(kBatchAxes), rank);
  auto replica = at::full({1}, rank), across = at::full({1}, rank);
  mesh.group(Axis::DpShard)->all_reduce(replica, ReduceOp::Sum).wait();
  mesh.group(Axis::DpReplicate)->all_reduce(across, ReduceOp::Sum).wait();
  EXPECT_EQ(replica.item<int>(), rank < 2 ? 0 + 1 : 2 + 3);
  EXPECT_EQ(across.item<int>(), rank % 2 == 0 ? 0 + 2 : 1 + 3);
  mesh.group(Axis::DpShard)->barrier();
  mesh.group(Axis::DpReplicate)->barrier();
}

TEST(EnvironmentMesh, IsOneRankWithoutVariablesOrRefused) {
  EXPECT_EQ(environment_mesh(-1).size(kBatchAxes), 1);
  const Environment env({{"WORLD_SIZE", "3"}, {"RANK", "0"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  EXPECT_HAS(message_of<c10::ValueError>([] { environment_mesh(2); }), "the 3 data-parallel ranks are not a multiple");
}

// Of four ranks 0 1 | 2 3 share along tp and 0 2 | 1 3 along the other axis.
TEST(EnvironmentMesh, AxesInTheirOrder) {
  if (!in_ranks({4}, kGloo)) return;
  const int rank = std::stoi(std::getenv("RANK"));
  for (const Axis axis : {Axis::DpShard, Axis::Sp}) {
    std::map<Axis, int> sizes{{Axis::Tp, 2}};
    if (axis == Axis::Sp) sizes[axis] = 2;
    const auto mesh = environment_mesh(sizes, 60s);
    EXPECT_EQ(mesh.size(axis), 2);
    auto inner = at::full({1}, rank), outer = at::full({1}, rank);
    mesh.group(Axis::Tp)->all_reduce(inner, ReduceOp::Sum).wait();
    mesh.group(axis)->all_reduce(outer, ReduceOp::Sum).wait();
    EXPECT_EQ(inner.item<int>(), rank < 2 ? 0 + 1 : 2 + 3);
    EXPECT_EQ(outer.item<int>(), rank % 2 == 0 ? 0 + 2 : 1 + 3);
    mesh.group(Axis::Tp)->barrier();
    mesh.group(axis)->barrier();
  }
  const auto mesh = environment_mesh({{Axis::DpShard, 2}, {Axis::Sp, 2}}, 60s);
  EXPECT_EQ(mesh.group(kStateAxes)->rank(), rank);
  mesh.group(kStateAxes)->barrier();
}

// Told before anybody waits in a group that not all ranks make.
TEST(EnvironmentMesh, RanksThatAskForOthersAreAnError) {
  if (!in_ranks({2, 4}, kGloo)) return;
  const bool odd = std::string(std::getenv("RANK")) == "1";
  const auto begin = std::chrono::steady_clock::now();
  const auto error = [](const auto& build) { return message_of<c10::ValueError>(build); };
  EXPECT_HAS(error([&] { environment_mesh(odd ? 1 : -1, 1, 1, 60s); }),
             "different meshes: rank 0 has zero_optimization.mics_shard_size -1, rank 1 has "
             "zero_optimization.mics_shard_size 1");
  EXPECT_HAS(error([&] { environment_mesh(-1, odd ? 2 : 1, 1, 60s); }), "rank 1 has sequence_parallel_size 2");
  EXPECT_HAS(error([&] { environment_mesh(-1, 1, odd ? 2 : 1, 60s); }), "rank 1 has tensor_parallel.autotp_size 2");
  EXPECT_HAS(error([&] { environment_mesh({{odd ? Axis::Sp : Axis::Tp, 2}}, 60s); }), "rank 1 has sp 2 in part 0");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
  const auto mesh = environment_mesh(-1, 1, 1, 60s);
  mesh.group(Axis::DpShard)->barrier();
}

TEST(EnvironmentMesh, AxesThatDoNotFitAreRefused) {
  EXPECT_EQ(environment_mesh({{Axis::Tp, 1}}).size(Axis::Tp), 1);
  const Environment env({{"WORLD_SIZE", "6"}, {"RANK", "0"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  const auto error = [](const std::map<Axis, int>& sizes) {
    return message_of<c10::ValueError>([&] { environment_mesh(sizes); });
  };
  EXPECT_HAS(error({{Axis::Sp, 2}, {Axis::Tp, 2}}), "sp 2 x tp 2 has 4 ranks, which do not divide WORLD_SIZE 6");
  EXPECT_HAS(error({{Axis::DpShard, 1}, {Axis::Tp, 2}}), "which are not WORLD_SIZE 6");
  EXPECT_HAS(error({{Axis::Tp, 0}}), "0 ranks along tp");
}

TEST(EnvironmentGroup, WritingToADeadPeerIsNoSignal) {
  if (!in_ranks({2}, kGloo)) return;
  const auto group = environment_group(60s);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[0]);
  EXPECT_EQ(write(ends[1], "x", 1), -1);  // an error and not the signal that ends the process
  EXPECT_EQ(errno, EPIPE);
  close(ends[1]);
  group->barrier();
}

TEST(EnvironmentGroup, AHandlerOfTheProgramStays) {
  if (!in_ranks({2}, kGloo)) return;
  const auto mine = +[](int) {};
  std::signal(SIGPIPE, mine);
  const auto group = environment_group(60s);
  EXPECT_EQ(std::signal(SIGPIPE, mine), mine);
  group->barrier();
}

constexpr auto kDead = "no answer within 2.0 s from rank(s) 2 (dead";

TEST(EnvironmentGroup, SurvivorsNameARankKilledBeforeACollective) {
  if (in_ranks({3}, kGloo, /*lost=*/2)) testing::lose_rank_2(/*inside=*/false, kDead);
}

TEST(EnvironmentGroup, SurvivorsNameARankKilledInsideACollective) {
  if (in_ranks({3}, kGloo, /*lost=*/2)) testing::lose_rank_2(/*inside=*/true, kDead);
}

// Rank 2's end is no error on a connection that rank 0 waits on.
TEST(EnvironmentGroup, ARankWhoseProcessHasEndedIsMissedByThoseWhoWait) {
  if (!in_ranks({3}, kGloo, /*lost=*/2)) return;
  const auto group = environment_group(10min);
  group->barrier();
  leave_mark("met");
  if (group->rank() == 2) die_once_all_have_met();
  const bool waits = group->rank() == 0;
  if (!waits) {
    EXPECT_TRUE(await_marks("told", {0}));
  }
  auto t = at::ones({1000});
  const auto text = message_of<c10::DistBackendError>([&] { group->broadcast(t, 1, "unit 'c'").wait(); });
  EXPECT_HAS(text, "broadcast (unit 'c', 4000 B) failed");
  EXPECT_HAS(text, "lost rank 2: its process ");
  EXPECT_HAS(text, " has ended");
  leave_mark("told");
  EXPECT_TRUE(await_marks("told", {0, 1}));
}

// The others come to the next meeting, where it has not been.
TEST(EnvironmentGroup, ARankThatEndsBetweenTwoGroupsIsNamed) {
  if (!testing::is_rank()) {
    for (const char* lost : {"0", "2"})
      for (const char* transport : {"gloo", "auto"})
        expect_success(run_processes(3, {{"TESSERA_TRANSPORT", transport}, {"TESSERA_TEST_LOST", lost}}),
                       std::stoi(lost));
    return;
  }
  const int lost = std::stoi(std::getenv("TESSERA_TEST_LOST"));
  std::vector<int> others{0, 1, 2};
  std::erase(others, lost);
  {
    const auto mesh = environment_mesh(-1, 1, 1, 10min);
    const int rank = mesh.rank(kAxes);
    mesh.group(Axis::DpShard)->barrier();
    leave_mark("met");
    if (rank == lost) {
      EXPECT_TRUE(await_marks("met", others));
      raise(SIGKILL);
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto text = message_of<c10::DistBackendError>([] { environment_mesh(-1, 1, 1, 10min); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
  EXPECT_HAS(text, "lost rank " + std::to_string(lost) + ": its process ");
  leave_mark("told");
  EXPECT_TRUE(await_marks("told", others));
}

TEST(EnvironmentGroup, AnAbortReachesBlockedRanksWithItsReason) {
  if (!in_ranks({3}, kGloo)) return;
  const auto group = environment_group(60s);
  group->barrier();
  if (group->rank() == 1) {
    group->abort("the loss is NaN");
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier(); }), "rank 1 aborted: the loss is NaN");
    EXPECT_TRUE(await_marks("told", {0, 2}));  // alive, with open connections: only the store can tell the others
    return;
  }
  auto t = at::ones({1000});
  const auto text = message_of<c10::DistBackendError>([&] { group->all_reduce(t, ReduceOp::Avg, "loss").wait(); });
  EXPECT_HAS(text, "all_reduce (loss, 4000 B) failed");
  EXPECT_HAS(text, "rank 1 aborted: the loss is NaN");
  leave_mark("told");
  EXPECT_TRUE(await_marks("told", {0, 2}));
}

TEST(EnvironmentGroup, ARankThatThrowsAndEndsIsQuoted) {
  if (!in_ranks({2}, kGloo)) return;
  try {
    const auto group = environment_group(60s);
    group->barrier();
    try {
      if (group->rank() == 1) throw std::runtime_error("shape mismatch in batch 7");
      auto t = at::ones({1000});
      group->all_reduce(t, ReduceOp::Avg, "loss").wait();
    } catch (const std::exception& error) {
      group->abort(error.what());
      throw;
    }
  } catch (const c10::DistBackendError& error) {
    EXPECT_HAS(std::string(error.what()), "rank 1 aborted: shape mismatch in batch 7");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "shape mismatch in batch 7");
  }
}

TEST(EnvironmentGroup, ALateRankFailsTheOthersAtTheTimeoutAndItselfWithTheFirstCause) {
  if (!in_ranks({2}, kGloo)) return;
  leave_mark("started");
  EXPECT_TRUE(await_marks("started", {0, 1}));
  const auto group = environment_group(5s);
  group->barrier();
  if (group->rank() == 1) {
    EXPECT_TRUE(await_marks("told", {0}));
  }
  auto part = at::ones({10}), full = at::ones({20});
  const auto text = message_of<c10::DistBackendError>([&] { group->all_gather(full, part, "weights").wait(); });
  EXPECT_HAS(text, "all_gather (weights, 80 B) failed");
  EXPECT_HAS(text, "rank 0 in all_gather (weights, 80 B) lost rank 1");
  if (group->rank() == 0) {
    EXPECT_HAS(text, "no answer within 2.0 s from rank(s) 1");
  }
  leave_mark("told");
  EXPECT_TRUE(await_marks("told", {0, 1}));
}

// Two units of one size whose gathers two processes begin in different orders.
TEST(EnvironmentGroup, UnitsGatheredInDifferentOrdersAreNamed) {
  if (!in_ranks({2}, kGloo)) return;
  const auto group = environment_group(60s);
  group->barrier("start");
  at::Tensor a = at::zeros({200000}), b = at::zeros({200000}), mine = at::ones({100000});
  auto first = group->rank() == 0 ? group->all_gather(a, mine, "parameters of unit 'a'")
                                  : group->all_gather(b, mine, "parameters of unit 'b'");
  auto second = group->rank() == 0 ? group->all_gather(b, mine, "parameters of unit 'b'")
                                   : group->all_gather(a, mine, "parameters of unit 'a'");
  const auto text = message_of<c10::DistBackendError>([&] { first.wait(); });
  EXPECT_HAS(text,
             "the ranks disagree: rank 0 called all_gather (parameters of unit 'a', 800000 B, Float), rank 1 called "
             "all_gather (parameters of unit 'b', 800000 B, Float)");
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier("later"); }), "the ranks disagree");
  leave_mark("told");
  EXPECT_TRUE(await_marks("told", {0, 1}));
}

}  // namespace
}  // namespace tessera::comm

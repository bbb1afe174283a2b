#include "tessera/comm/hosts/hosts.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <thread>

namespace tessera::comm {
namespace {

TEST(Hosts, AreNumberedByTheirFirstRank) {
  const Hosts hosts = group_by_host({"b", "a", "b", "c", "a"});
  EXPECT_EQ(hosts.of_rank, (std::vector<int>{0, 1, 0, 2, 1}));
  EXPECT_EQ(hosts.count(), 3);
  EXPECT_EQ(hosts.ranks_on(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(Hosts{}.count(), 0);
}

TEST(HostId, IsThatOfMachineAndUserUnlessSet) {
  const std::string id = host_id();
  EXPECT_EQ(host_id(), id);
  EXPECT_NE(id.find(" " + std::to_string(geteuid())), std::string::npos);
  setenv("TESSERA_HOST_ID", "left", 1);
  EXPECT_NE(host_id(), id);
  unsetenv("TESSERA_HOST_ID");
}

TEST(Exchange, GivesEveryRankWhatEveryRankSays) {
  c10d::HashStore store;
  std::vector<std::vector<std::string>> heard(3);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 3; ++r)
    ranks.emplace_back([&, r] { heard[r] = exchange(store, r, 3, "colour", "c" + std::to_string(r)); });
  for (auto& rank : ranks)
    rank.join();
  for (const auto& list : heard)
    EXPECT_EQ(list, (std::vector<std::string>{"c0", "c1", "c2"}));
}

TEST(StartOfProcess, DistinguishesTheLivingFromTheDead) {
  const uint64_t mine = start_of_process(getpid());
  EXPECT_GT(mine, 0u);
  EXPECT_EQ(start_of_process(getpid()), mine);
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  EXPECT_GE(start_of_process(child), mine);
  kill(child, SIGKILL);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  EXPECT_EQ(start_of_process(child), 0u);  // a zombie
  waitpid(child, nullptr, 0);
  EXPECT_EQ(start_of_process(child), 0u);
}

}  // namespace
}  // namespace tessera::comm

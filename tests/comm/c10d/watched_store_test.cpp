#include "tessera/comm/c10d/watched_store.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/comm/hosts/hosts.h"
#include "tests/comm/collectives.h"
#include "tests/comm/process_ranks.h"
#include "tests/support/processes.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::message_of;

struct WatchedStores : ::testing::Test {
  WatchedStores() { store->setTimeout(1s); }
  // As rank 1, a process that has ended.
  pid_t show_ended() {
    const pid_t child = fork();
    if (child == 0) pause();
    store->set("tessera/fault/process/1",
               std::to_string(child) + " " + std::to_string(start_of_process(child)) + " " + host_id());
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    return child;
  }
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(WatchedStores, WaitForWhatComesLate) {
  const auto mine = watch_store(store, 0, 2), theirs = watch_store(store, 1, 2);
  mine->setTimeout(1min);
  std::thread late([&] {
    std::this_thread::sleep_for(1200ms);
    theirs->set("key", std::string("value"));
  });
  EXPECT_EQ(mine->get_to_str("key"), "value");
  late.join();
}

TEST_F(WatchedStores, EndAtTheirTimeout) {
  const auto mine = watch_store(store, 0, 2);
  EXPECT_THROW(mine->get_to_str("key"), std::exception);
}

TEST_F(WatchedStores, NameALostRankUnlessItHasSaidWhatIsWaitedFor) {
  store->setTimeout(1h);
  const auto mine = watch_store(store, 0, 2);
  const std::string pid = std::to_string(show_ended());
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { mine->get_to_str("key"); }),
             "[comm] rank 0 of 2: lost rank 1: its process " + pid + " has ended");
  mine->set("key", std::string("value"));
  EXPECT_EQ(mine->get_to_str("key"), "value");
}

TEST_F(WatchedStores, PassOnWhatAnotherRankHasReported) {
  const auto mine = watch_store(store, 0, 2);
  job_board(store, 1, 2).report("rank 1 has no disk");
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { mine->get_to_str("key"); }), "rank 1 has no disk");
}

TEST_F(WatchedStores, ComingTogetherSaysWhoIsMissing) {
  std::thread other([&] { EXPECT_THROW(come_together(store, 2, 3), c10::DistBackendError); });
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { come_together(store, 0, 3); }),
             "[comm] rank 0 of 3: rank(s) 1 did not come within 1 s, rank(s) 0, 2 did");
  other.join();
}

TEST_F(WatchedStores, ComingTogetherNamesTwoOfOneRank) {
  store->set("tessera/fault/process/1", std::string("1 1 another host"));
  EXPECT_HAS(message_of<c10::ValueError>([&] { come_together(store, 1, 2); }),
             "processes 1 and " + std::to_string(getpid()) + " of two hosts both have RANK 1");
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { come_together(store, 0, 3); }), "both have RANK 1");
}

TEST(JobStore, ARankThatComesBeforeItsHostHasShownItselfIsNamed) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.port = testing::free_port();
  const auto host = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::string said;
  std::thread second([&] {
    said = message_of<c10::DistBackendError>([&] { open_job_store("127.0.0.1", options.port, 0, 2, 1min); });
  });
  auto board = job_board(c10::make_intrusive<c10d::PrefixStore>("tessera/attempt_0", host), 0, 2);
  board.await_process(0, 20s);
  board.report("processes 1 and 2 of one host both have RANK 0");
  second.join();
  EXPECT_HAS(said, "processes 1 and 2 of one host both have RANK 0");
}

// A program that takes connections and says nothing has the port: all ranks end, long before the timeout.
TEST(JobStore, AMuteHolderOfThePortEndsAllRanks) {
  const int mute = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(place);
  ASSERT_EQ(bind(mute, reinterpret_cast<sockaddr*>(&place), size), 0);
  ASSERT_EQ(listen(mute, 8), 0);
  getsockname(mute, reinterpret_cast<sockaddr*>(&place), &size);
  std::string said[2];
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      said[rank] = message_of<c10::Error>([&] { open_job_store("127.0.0.1", ntohs(place.sin_port), rank, 2, 1min); });
    });
  for (std::thread& rank : ranks)
    rank.join();
  EXPECT_HAS(said[0], "EADDRINUSE");
  EXPECT_HAS(said[1], "does not answer as a store: another program has the port");
}

// Rank 1 is there for a second time and waits for a rank 2 as its host is killed; process 2 is the next host, at the same place.
TEST(JobStore, AHostThatEndsWhileOthersWaitIsNamedAndAnotherTakesItsPlace) {
  if (!testing::in_ranks({3}, {}, /*lost=*/0)) return;
  std::signal(SIGPIPE, SIG_IGN);
  const int process = std::stoi(std::getenv("RANK"));
  const auto open = [](int rank, int size) {
    return open_job_store("127.0.0.1", std::stoi(std::getenv("MASTER_PORT")), rank, size, 1min);
  };
  if (process == 0) {
    const auto store = open(0, 2);
    EXPECT_TRUE(testing::await_marks("comes", {1}));
    std::this_thread::sleep_for(1s);
    raise(SIGKILL);
  } else if (process == 1) {
    open(1, 2);
    testing::leave_mark("comes");
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { open(1, 3); }), "rank 1 of 3: lost rank 0: its process ");
    testing::leave_mark("told");
    c10::intrusive_ptr<c10d::Store> store;
    for (const auto end = std::chrono::steady_clock::now() + 30s; !store && std::chrono::steady_clock::now() < end;) {
      try {
        store = open(1, 2);
      } catch (const c10::DistBackendError& error) {
        EXPECT_HAS(std::string(error.what()), "lost rank 0");  // nobody listens yet
      }
    }
    ASSERT_TRUE(store);
    store->set("key", "value");
  } else {
    EXPECT_TRUE(testing::await_marks("told", {1}));
    EXPECT_EQ(open(0, 2)->get_to_str("key"), "value");
  }
}

TEST_F(WatchedStores, ARankMayComeAgainAndInPlaceOfOneThatHasEnded) {
  show_ended();
  std::thread other([&] { come_together(store, 0, 2); });
  come_together(store, 1, 2);
  come_together(store, 1, 2);
  other.join();
}

}  // namespace
}  // namespace tessera::comm

#include "tessera/comm/c10d/fault_board.h"

#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <thread>

#include "tessera/comm/hosts/hosts.h"
#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

struct FaultBoards : ::testing::Test {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  FaultBoard a{store, 0, 3, "g"}, b{store, 1, 3, "g"};
};

TEST_F(FaultBoards, TheFirstCauseWins) {
  EXPECT_FALSE(a.reported().has_value());
  EXPECT_EQ(a.report("first"), "first");
  EXPECT_EQ(b.report("second"), "first");
  EXPECT_EQ(b.reported().value(), "first");
  EXPECT_FALSE(FaultBoard(store, 0, 3, "another group").reported().has_value());
}

TEST_F(FaultBoards, TheRollCallNamesTheSilent) {
  std::string said;
  std::thread other([&] { said = b.roll_call(1s); });
  EXPECT_EQ(a.roll_call(1s), "no answer within 1.0 s from rank(s) 2 (dead, or busy outside of any collective)");
  other.join();
  EXPECT_HAS(said, "rank(s) 2 ");
  FaultBoard(store, 2, 3, "g").roll_call(0ms);
  EXPECT_EQ(a.roll_call(1s), "");
}

TEST_F(FaultBoards, RanksShowEachOtherTheirCalls) {
  EXPECT_EQ(a.shown_calls(1), "");
  b.show_calls("first");
  b.show_calls("second");
  EXPECT_EQ(a.shown_calls(1), "second");
  EXPECT_EQ(a.shown_calls(0), "");
}

TEST_F(FaultBoards, AnEndedProcessOfThisHostIsFound) {
  EXPECT_EQ(a.ended_process(1), std::nullopt);  // has not said which it is
  b.show_process();
  EXPECT_EQ(a.ended_process(1), std::nullopt);  // this one
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  const auto say = [&](int pid, uint64_t start, const std::string& host) {
    store->set("tessera/fault/process/1", std::to_string(pid) + " " + std::to_string(start) + " " + host);
    return FaultBoard(store, 0, 3, "g").ended_process(1);
  };
  EXPECT_EQ(say(child, 1, host_id()), child);
  EXPECT_EQ(say(getpid(), 1, host_id()), getpid());  // another process has its id now
  EXPECT_EQ(say(child, 1, "elsewhere"), std::nullopt);
  waitpid(child, nullptr, 0);
}

TEST(FaultBoard, AStoreThatIsGoneIsReportedAndNotThrown) {
  struct Broken : c10d::HashStore {
    void set(const std::string&, const std::vector<uint8_t>&) override { throw std::runtime_error("reset by peer"); }
    std::vector<uint8_t> compareSet(const std::string&, const std::vector<uint8_t>&,
                                    const std::vector<uint8_t>&) override {
      throw std::runtime_error("reset by peer");
    }
    bool check(const std::vector<std::string>&) override { throw std::runtime_error("reset by peer"); }
  };
  FaultBoard board(c10::make_intrusive<Broken>(), 1, 2, "g");
  EXPECT_EQ(board.report("mine"), "mine");
  EXPECT_FALSE(board.reported().has_value());
  board.show_calls("mine");
  EXPECT_EQ(board.shown_calls(1), "");
  board.show_process();
  EXPECT_EQ(board.ended_process(1), std::nullopt);
  EXPECT_HAS(board.roll_call(100ms), "store cannot be reached");
}

TEST(FaultBoard, WorksWithoutAStore) {
  FaultBoard board(nullptr, 0, 2, "g");
  EXPECT_EQ(board.report("mine"), "mine");
  EXPECT_FALSE(board.reported().has_value());
  EXPECT_EQ(board.roll_call(100ms), "");
  board.show_calls("mine");
  EXPECT_EQ(board.shown_calls(0), "");
}

}  // namespace
}  // namespace tessera::comm

#include "tessera/comm/shm/world.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::message_of;

std::shared_ptr<ShmSegment> segment_for(int size) {
  auto segment = ShmSegment::create(ShmLayout{size}.total());
  segment->reserve(0, ShmLayout{size}.control());
  return segment;
}

struct TwoRanks : ::testing::Test {
  explicit TwoRanks(std::chrono::milliseconds timeout = 1min)
      : segment(segment_for(2)), a(segment, 0, 2, timeout), b(segment, 1, 2, timeout) {
    a.add_channel();
    b.add_channel();
  }
  ShmOpPtr launch(ShmWorld& world, const std::string& label) {
    auto op = shm_barrier(world.rank(), 2, label);
    world.launch(0, op);
    return op;
  }
  std::shared_ptr<ShmSegment> segment;
  ShmWorld a, b;
};

TEST_F(TwoRanks, RunALaunchInAWait) {
  EXPECT_TRUE(a.unseen().empty());
  const auto mine = launch(a, "x");
  std::thread other([&] { b.wait(0, *launch(b, "x"), {}); });
  a.wait(0, *mine, {});
  other.join();
  EXPECT_TRUE(mine->done);
}

TEST_F(TwoRanks, KeepTheFirstCause) {
  a.abort("no more data");
  b.abort("another reason");
  for (ShmWorld* world : {&a, &b}) {
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { launch(*world, "x"); }),
               "barrier (x, 0 B) failed after 0.00 s: rank 0 aborted: no more data");
  }
}

TEST_F(TwoRanks, AreWokenByAFailure) {
  const auto mine = launch(a, "x");
  std::thread other([&] { b.abort("stop"); });
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { a.wait(0, *mine, {}); }), "rank 1 aborted: stop");
  other.join();
}

TEST_F(TwoRanks, ACauseMayBeLongerThanItsPlace) {
  a.abort(std::string(100000, 'x'));
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { launch(b, "x"); }), "rank 0 aborted: xxx");
}

TEST_F(TwoRanks, AreCalledAsTheirNumbersSay) {
  ShmWorld other(segment, 1, 2, 300ms, {4, 7});
  other.add_channel();
  const auto op = shm_barrier(1, 2, "x");
  other.launch(0, op);
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { other.wait(0, *op, {}); }),
             "rank 7 in barrier (x, 0 B) timed out after 0.3 s waiting for rank(s) 4 (");
}

TEST_F(TwoRanks, ThoseWhoLeaveAreNamed) {
  const auto mine = launch(a, "x");
  b.leave(0);
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { a.wait(0, *mine, {}); }),
             "rank 1 destroyed its group without making this call");
}

TEST_F(TwoRanks, ChannelsAreLimited) {
  EXPECT_EQ(a.add_channel(), 1);
}

struct TwoHurriedRanks : TwoRanks {
  TwoHurriedRanks() : TwoRanks(300ms) {}
};

TEST_F(TwoHurriedRanks, NameWhoDoesNotCome) {
  const auto mine = launch(a, "x");
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { a.wait(0, *mine, {}); }),
             "rank 0 in barrier (x, 0 B) timed out after 0.3 s waiting for rank(s) 1");
}

TEST(ShmWorld, ADeadProcessIsNamedLongBeforeTheTimeout) {
  const auto segment = segment_for(2);
  const pid_t child = fork();
  if (child == 0) {
    ShmWorld world(segment, 1, 2, 1min);
    _exit(0);
  }
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  ShmWorld world(segment, 0, 2, 1h);
  EXPECT_EQ(world.unseen(), std::vector<int>{1});
  world.add_channel();
  const auto mine = shm_barrier(0, 2, "x");
  world.launch(0, mine);
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { world.wait(0, *mine, {}); }),
             "rank 0 in barrier (x, 0 B) lost rank 1: its process " + std::to_string(child) + " has ended");
  waitpid(child, nullptr, 0);
}

// A rank that makes its last call and ends. What it wrote is there whatever becomes of it; the next call names it.
pid_t start_rank_that_ends(const std::shared_ptr<ShmSegment>& segment, std::chrono::milliseconds after) {
  const pid_t child = fork();
  if (child != 0) return child;
  ShmWorld world(segment, 1, 2, 1min);
  world.add_channel();
  std::this_thread::sleep_for(after);
  world.launch(0, shm_barrier(1, 2, "x"));
  _exit(0);
}

TEST(ShmWorld, ARankMayEndRightAfterItsLastRecord) {
  const auto segment = segment_for(2);
  const pid_t child = start_rank_that_ends(segment, 0ms);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  ShmWorld world(segment, 0, 2, 1h);
  world.add_channel();
  const auto mine = shm_barrier(0, 2, "x"), next = shm_barrier(0, 2, "y");
  world.launch(0, mine);
  world.wait(0, *mine, {});
  EXPECT_TRUE(mine->done);
  world.launch(0, next);
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { world.wait(0, *next, {}); }), "barrier (y, 0 B) lost rank 1");
  waitpid(child, nullptr, 0);
}

// The same while rank 0 sleeps and looks, 0.1 s after it began, at the records and at who still runs.
TEST(ShmWorld, ARankMayEndWhileTheOtherLooks) {
  std::vector<pid_t> children;
  for (int i = 0; i < 40; ++i) {
    const auto segment = segment_for(2);
    ShmWorld world(segment, 0, 2, 1h);
    world.add_channel();
    children.push_back(start_rank_that_ends(segment, std::chrono::milliseconds(90 + i / 2)));
    while (!world.unseen().empty())
      std::this_thread::yield();
    const auto mine = shm_barrier(0, 2, "x");
    world.launch(0, mine);
    EXPECT_NO_THROW(world.wait(0, *mine, {}));
  }
  for (const pid_t child : children)
    waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace tessera::comm

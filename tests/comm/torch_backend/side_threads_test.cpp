#include "tessera/comm/torch_backend/side_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

// Its thread runs until end_threads().
struct Keeper : SideThreads::Owner {
  void end_threads() override { asked.count_down(); }
  std::latch asked{1};
};

TEST(SideThreads, EndTogether) {
  const auto threads = std::make_shared<SideThreads>();
  const auto keeper = std::make_shared<Keeper>();
  std::atomic<int> ended = 0;
  threads->add(std::make_shared<Keeper>());  // gone at once
  threads->add(keeper);
  const auto body = [&] {
    keeper->asked.wait();
    ended += 1;
  };
  EXPECT_TRUE(threads->start(body) && threads->start(body));
  EXPECT_TRUE(threads->stop(1min));
  EXPECT_EQ(ended, 2);
  EXPECT_FALSE(threads->start([&] { ended += 1; }));
  EXPECT_EQ(ended, 2);
}

TEST(SideThreads, AreNotWaitedForForever) {
  const auto threads = std::make_shared<SideThreads>();
  const auto go = std::make_shared<std::latch>(1);
  EXPECT_TRUE(threads->start([go] { go->wait(); }));
  EXPECT_FALSE(threads->stop(10ms));
  go->count_down();
  EXPECT_TRUE(threads->stop(1min));
}

// What a thread holds is gone when it counts as ended.
TEST(SideThreads, LetGoBeforeTheyEnd) {
  const auto threads = std::make_shared<SideThreads>();
  const auto held = std::make_shared<int>(1);
  EXPECT_TRUE(threads->start([held] {}));
  EXPECT_TRUE(threads->stop(1min));
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace tessera::comm

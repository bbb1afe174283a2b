#include "tessera/comm/shm/signal.h"

#include <gtest/gtest.h>

#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

TEST(Bell, WakesWhoSleeps) {
  Bell bell{};
  std::atomic<bool> said = false;
  std::thread other([&] {
    while (bell.sleepers.load() == 0)
      std::this_thread::yield();
    said = true;
    ring(bell);
  });
  while (!said.load()) {
    const uint32_t count = bell.count.load();
    bell.sleepers.fetch_add(1);
    if (!said.load()) sleep_at(bell, count, 60s);
    bell.sleepers.fetch_sub(1);
  }
  other.join();
}

TEST(Bell, ARingAfterTheCountWasReadIsNotMissed) {
  Bell bell{};
  const uint32_t count = bell.count.load();
  bell.sleepers.fetch_add(1);
  ring(bell);
  sleep_at(bell, count, 1h);  // returns at once
  EXPECT_NE(bell.count.load(), count);
}

TEST(Bell, ASleepEndsWithItsLimit) {
  Bell bell{};
  sleep_at(bell, 0, 1ms);
  EXPECT_EQ(bell.count.load(), 0u);
}

}  // namespace
}  // namespace tessera::comm

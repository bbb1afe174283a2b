#include "tessera/comm/shm/signal.h"

#include <gtest/gtest.h>

#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

TEST(Doorbell, WakesWhoSleeps) {
  Doorbell doorbell{};
  std::atomic<bool> said = false;
  std::thread other([&] {
    while (doorbell.sleepers.load() == 0)
      std::this_thread::yield();
    said = true;
    ring(doorbell);
  });
  const auto begun = std::chrono::steady_clock::now();
  while (!said.load()) {
    const uint32_t count = doorbell.count.load();
    doorbell.sleepers.fetch_add(1);
    if (!said.load()) sleep_at(doorbell, count, 60s);
    doorbell.sleepers.fetch_sub(1);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 50s) << "it slept until its limit";
  other.join();
}

TEST(Doorbell, ARingAfterTheCountWasReadIsNotMissed) {
  Doorbell doorbell{};
  const uint32_t count = doorbell.count.load();
  doorbell.sleepers.fetch_add(1);
  ring(doorbell);
  sleep_at(doorbell, count, 1h);  // returns at once
  EXPECT_NE(doorbell.count.load(), count);
}

TEST(Doorbell, ASleepEndsWithItsLimit) {
  Doorbell doorbell{};
  sleep_at(doorbell, 0, 1ms);
  EXPECT_EQ(doorbell.count.load(), 0u);
}

}  // namespace
}  // namespace tessera::comm

// Doorbell: how a rank sleeps until another one has done something.
//
// Note [Doorbell]
//   Every rank has one doorbell. A sleeper (1) reads the count, (2) says that it sleeps, (3) looks once more whether there is
//   something to do, (4) sleeps unless the count has changed. Who has done something (1) publishes it, (2) looks for
//   sleepers, (3) changes the count and wakes. All of it in one total order (seq_cst), so a wake is never missed, and a
//   system call is made only when somebody sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::comm {

// A doorbell lies in shared memory, zeroed at first.
struct Doorbell {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> wants_space;  // sleepers that also wait for free slots
};

// Wakes those who sleep at the doorbell, if any.
void ring(Doorbell& doorbell);
// Sleeps until the doorbell rings, unless it has since `count` was read, or `limit` has passed.
void sleep_at(Doorbell& doorbell, uint32_t count, std::chrono::milliseconds limit);

// A short pause inside a spinning loop.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace tessera::comm

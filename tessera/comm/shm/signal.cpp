#include "tessera/comm/shm/signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tessera::comm {
namespace {

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

}  // namespace

void ring(Doorbell& doorbell) {
  if (doorbell.sleepers.load() == 0) return;
  doorbell.count.fetch_add(1);
  futex(doorbell.count, FUTEX_WAKE, INT_MAX, nullptr);
}

void sleep_at(Doorbell& doorbell, uint32_t count, std::chrono::milliseconds limit) {
  const timespec time{.tv_sec = static_cast<time_t>(limit.count() / 1000),
                      .tv_nsec = static_cast<long>(limit.count() % 1000 * 1000000)};
  futex(doorbell.count, FUTEX_WAIT, count, &time);
}

}  // namespace tessera::comm

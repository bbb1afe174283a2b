#include "tessera/comm/shm_signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string>

namespace tessera::comm {
namespace {

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

}  // namespace

void ring(Bell& bell) {
  if (bell.sleepers.load() == 0) return;
  bell.count.fetch_add(1);
  futex(bell.count, FUTEX_WAKE, INT_MAX, nullptr);
}

void sleep_at(Bell& bell, uint32_t count, std::chrono::milliseconds limit) {
  const timespec time{.tv_sec = static_cast<time_t>(limit.count() / 1000),
                      .tv_nsec = static_cast<long>(limit.count() % 1000 * 1000000)};
  futex(bell.count, FUTEX_WAIT, count, &time);
}

// The fields of /proc/<pid>/stat: id, name in parentheses (may hold anything), state, then numbers; the start is the
// twentieth after the state.
uint64_t start_of_process(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 0;
  const auto end = line.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(line.substr(end + 1));
  char state = 0;
  std::string skipped;
  fields >> state;
  if (state == 'Z' || state == 'X') return 0;
  for (int i = 0; i < 18; ++i)
    fields >> skipped;
  uint64_t start = 0;
  fields >> start;
  return fields ? start : 0;
}

}  // namespace tessera::comm

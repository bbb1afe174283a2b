#include "tessera/comm/process_owner.h"

#include <pthread.h>

#include <atomic>

namespace tessera::comm {
namespace {

// How many forks lie between the program's start and this process. Asking the system for the process would cost as much as a
// small collective.
std::atomic<uint32_t>& forks() {
  static std::atomic<uint32_t> count = 0;
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  return count;
}

}  // namespace

ProcessOwner::ProcessOwner() : forks_(forks().load(std::memory_order_relaxed)) {}

bool ProcessOwner::is_here() const {
  return forks().load(std::memory_order_relaxed) == forks_;
}

}  // namespace tessera::comm

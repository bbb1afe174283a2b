#include "tessera/base/outlive.h"

#include <unistd.h>

#include <mutex>
#include <utility>
#include <vector>

namespace tessera {

namespace {

class Threads {
 public:
  // A process that was forked meanwhile has none of them.
  ~Threads() {
    for (auto& [process, thread] : threads_) {
      if (process == ::getpid()) {
        thread.join();
      } else {
        thread.detach();
      }
    }
  }

  void add(std::thread thread) {
    const std::lock_guard lock(mutex_);
    threads_.emplace_back(::getpid(), std::move(thread));
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<::pid_t, std::thread>> threads_;
};

}  // namespace

void outlive(std::thread thread) {
  static Threads threads;
  threads.add(std::move(thread));
}

}  // namespace tessera

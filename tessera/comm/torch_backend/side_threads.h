// SideThreads: threads beside the program, and the end of all of them.
//
// Note [Python's end]
//   A thread that lets go of a tensor which Python knows, or runs a callback written in Python, needs the interpreter's
//   lock. When the interpreter ends, whoever asks for that lock is ended on the spot by pthread_exit(), and C++ makes an
//   abort() of it. So such threads must be through before: the Python package has stop() called by `atexit`, which comes
//   first. From then on calls move only while the program waits for them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/comm/process_owner.h"

namespace tessera::comm {

class SideThreads : public std::enable_shared_from_this<SideThreads> {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void end_threads() = 0;  // ends them soon; may be called from any thread, also when there are none
  };

  void add(std::weak_ptr<Owner> owner);
  // Runs `body` in a new thread. False after stop(), and nothing is run.
  bool start(std::function<void()> body);
  // Ends the threads and waits for that, `limit` at most. False when some still run then. In a forked copy of the process
  // there are none.
  bool stop(std::chrono::milliseconds limit);

 private:
  const ProcessOwner owner_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<std::weak_ptr<Owner>> owners_;
  int running_ = 0;
  bool stopped_ = false;
};
using SideThreadsPtr = std::shared_ptr<SideThreads>;

}  // namespace tessera::comm

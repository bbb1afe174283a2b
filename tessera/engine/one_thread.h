// OneThread: calls that change an engine come from one thread at a time. Hooks of a backward may run on others.
#pragma once

#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::engine {

class OneThread {
 public:
  // A call begins, maybe inside another one of the same thread. UsageError where another thread is in one.
  void enter(const char* call) {
    const std::lock_guard lock(mutex_);
    TESSERA_CHECK(depth_ == 0 || thread_ == std::this_thread::get_id(), "engine", call, ": another thread is in ",
                  call_, " of this engine; calls come from one thread at a time");
    if (depth_++ == 0) call_ = call;
    thread_ = std::this_thread::get_id();
  }
  // A part of a call: UsageError where another thread is in one. `by_autograd`: this is a thread of autograd's own, which runs the
  // backward of whoever is in a forward or a backward.
  void check_beside(const char* call, bool by_autograd) {
    const std::lock_guard lock(mutex_);
    const std::string_view now = depth_ == 0 || thread_ == std::this_thread::get_id() ? "" : call_;
    TESSERA_CHECK(now.empty() || (by_autograd && (now == "forward" || now == "backward")), "engine", call,
                  ": another thread is in ", call_, " of this engine; calls come from one thread at a time");
  }
  void leave() noexcept {
    const std::lock_guard lock(mutex_);
    if (depth_ > 0) --depth_;
  }

  // A call that lasts as long as this object, unless it goes on.
  class Call {
   public:
    Call(OneThread& of, const char* call) : of_(&of) { of.enter(call); }
    ~Call() {
      if (of_ != nullptr) of_->leave();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    void go_on() { of_ = nullptr; }  // leave() follows

   private:
    OneThread* of_;
  };

 private:
  std::mutex mutex_;
  std::thread::id thread_;
  int depth_ = 0;
  const char* call_ = "";
};

}  // namespace tessera::engine

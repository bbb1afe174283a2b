#include "tessera/comm/torch_backend/side_threads.h"

#include <thread>

namespace tessera::comm {

void SideThreads::add(std::weak_ptr<Owner> owner) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(owners_, [](const auto& known) { return known.expired(); });
  owners_.push_back(std::move(owner));
}

bool SideThreads::start(std::function<void()> body) {
  {
    const std::scoped_lock lock(mutex_);
    if (stopped_) return false;
    running_ += 1;
  }
  std::thread([self = shared_from_this(), body = std::move(body)]() mutable {
    body();
    body = nullptr;  // what the body holds goes before the thread counts as ended
    const std::scoped_lock lock(self->mutex_);
    self->running_ -= 1;
    self->ended_.notify_all();
  }).detach();
  return true;
}

bool SideThreads::stop(std::chrono::milliseconds limit) {
  if (!owner_.is_here()) return true;
  std::unique_lock lock(mutex_);
  stopped_ = true;
  const auto owners = owners_;
  lock.unlock();
  for (const auto& known : owners) {
    if (const auto owner = known.lock()) owner->end_threads();
  }
  lock.lock();
  return ended_.wait_for(lock, limit, [this] { return running_ == 0; });
}

}  // namespace tessera::comm

#include "tessera/io/queue.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace tessera::io {

namespace {

class ThreadQueue final : public Queue {
 public:
  explicit ThreadQueue(int depth) {
    for (int i = 0; i < depth; ++i)
      threads_.emplace_back([this] { work(); });
  }
  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_)
      thread.join();
  }

  std::future<void> read(const File& file, void* to, int64_t bytes, int64_t offset) override {
    return add(std::packaged_task<void()>([&file, to, bytes, offset] { file.read(to, bytes, offset); }));
  }
  std::future<void> write(const File& file, const void* from, int64_t bytes, int64_t offset) override {
    return add(std::packaged_task<void()>([&file, from, bytes, offset] { file.write(from, bytes, offset); }));
  }

 private:
  std::future<void> add(std::packaged_task<void()> task) {
    std::future<void> result = task.get_future();
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(task));
    }
    changed_.notify_one();
    return result;
  }

  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return over_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      std::packaged_task<void()> task = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> waiting_;
  bool over_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Queue> make_queue(int depth) {
  return std::make_unique<ThreadQueue>(depth);
}

AlignedBytes aligned_bytes(int64_t bytes) {
  const int64_t whole = (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
  auto* memory = static_cast<char*>(std::aligned_alloc(kDirectAlignment, static_cast<size_t>(whole)));
  if (memory == nullptr) throw std::bad_alloc();
  return AlignedBytes(memory);
}

}  // namespace tessera::io

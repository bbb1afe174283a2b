// Transfers by io_uring: one ring, and a thread that takes what the kernel has done.
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/io/queue.h"

namespace tessera::io {

namespace {

constexpr int64_t kLargestPart = int64_t{1} << 30;

struct Transfer {
  const File* file;
  char* memory;
  int64_t bytes, offset;
  bool writes;
  std::promise<void> done{};

  int64_t part() const { return std::min(bytes, kLargestPart); }
  // The kernel moved `moved` bytes, or gave its reason. What is left goes the ordinary way, which also words the error.
  void finish(int64_t moved) {
    try {
      const int64_t from = std::max<int64_t>(moved, 0);
      if (writes)
        file->write(memory + from, bytes - from, offset + from);
      else
        file->read(memory + from, bytes - from, offset + from);
      done.set_value();
    } catch (...) {
      done.set_exception(std::current_exception());
    }
  }
};

// Written by the kernel, which the thread sanitizer does not see.
__attribute__((no_sanitize("thread"))) int64_t moved_by(const io_uring_cqe* completion) {
  return completion->res;
}

constexpr std::chrono::seconds kPatience{5};  // with a kernel that takes nothing

class UringQueue final : public Queue {
 public:
  explicit UringQueue(int depth) : depth_(depth) {
    const int result = ::io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0);
    TESSERA_CHECK_IO(result == 0, "io", "cannot make a ring: ", std::strerror(-result));
    thread_ = std::thread([this] { take_completed(); });
  }
  ~UringQueue() override {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    thread_.join();
    ::io_uring_queue_exit(&ring_);
  }

  std::future<void> read(const File& file, void* to, int64_t bytes, int64_t offset) override {
    return add(std::make_unique<Transfer>(Transfer{&file, static_cast<char*>(to), bytes, offset, false}));
  }
  std::future<void> write(const File& file, const void* from, int64_t bytes, int64_t offset) override {
    auto* memory = const_cast<char*>(static_cast<const char*>(from));
    return add(std::make_unique<Transfer>(Transfer{&file, memory, bytes, offset, true}));
  }

 private:
  std::future<void> add(std::unique_ptr<Transfer> transfer) {
    std::future<void> result = transfer->done.get_future();
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(transfer));
    start_waiting();
    return result;
  }

  // With the lock held.
  void start_waiting() {
    while (flying_ < depth_ && !waiting_.empty()) {
      std::unique_ptr<Transfer> transfer = std::move(waiting_.front());
      waiting_.pop_front();
      if (refusal_ == 0) refusal_ = submit(*transfer);
      if (refusal_ != 0) {
        refuse(*transfer);
        continue;
      }
      transfer.release();  // comes back by the completion
      ++flying_;
    }
    if (flying_ > 0) changed_.notify_one();
  }

  // Returns when the kernel has taken it, or why it will take none.
  int submit(Transfer& t) {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    const int fd = t.file->descriptor(t.memory, t.part(), t.offset);
    const auto bytes = static_cast<unsigned>(t.part());
    if (t.writes)
      ::io_uring_prep_write(entry, fd, t.memory, bytes, static_cast<uint64_t>(t.offset));
    else
      ::io_uring_prep_read(entry, fd, t.memory, bytes, static_cast<uint64_t>(t.offset));
    ::io_uring_sqe_set_data(entry, &t);
    const auto begin = std::chrono::steady_clock::now();
    while (::io_uring_sq_ready(&ring_) > 0) {
      const int result = ::io_uring_submit(&ring_);
      if (result < 0 && result != -EAGAIN && result != -EBUSY && result != -EINTR) return -result;
      if (result > 0) continue;
      // It may lack memory for a moment.
      if (std::chrono::steady_clock::now() - begin > kPatience) return result < 0 ? -result : EAGAIN;
      std::this_thread::yield();
    }
    return 0;
  }

  void refuse(Transfer& t) const {
    try {
      TESSERA_FAIL(IoError, "io", "cannot ", t.writes ? "write" : "read", " ", t.bytes, " bytes at ", t.offset,
                   t.writes ? " of" : " from", " '", t.file->path(),
                   "': io_uring takes no transfers: ", std::strerror(refusal_));
    } catch (...) {
      t.done.set_exception(std::current_exception());
    }
  }

  void take_completed() {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return flying_ > 0 || over_; });
        if (flying_ == 0) return;
      }
      io_uring_cqe* completion = nullptr;
      if (const int result = ::io_uring_wait_cqe(&ring_, &completion); result < 0) {
        // A signal; or waiting is refused for good, and what is on its way comes all the same.
        if (result != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      const int64_t moved = moved_by(completion);
      const std::unique_ptr<Transfer> transfer(static_cast<Transfer*>(::io_uring_cqe_get_data(completion)));
      ::io_uring_cqe_seen(&ring_, completion);
      {
        const std::lock_guard lock(mutex_);
        --flying_;
        start_waiting();
      }
      transfer->finish(moved);
    }
  }

  const int depth_;
  io_uring ring_{};
  std::mutex mutex_;  // of what follows, and of the ring's submissions
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Transfer>> waiting_;
  int flying_ = 0;
  int refusal_ = 0;  // errno of the kernel, for good
  bool over_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Queue> make_uring_queue(int depth) {
  return std::make_unique<UringQueue>(depth);
}

// A few bytes into memory that is a file, and back.
std::string test_uring() {
  io_uring ring{};
  if (const int result = ::io_uring_queue_init(1, &ring, 0); result < 0) return std::strerror(-result);
  const std::string sent = "tessera";
  std::string back(sent.size(), ' ');
  std::string fault;
  const int fd = ::memfd_create("tessera-io", MFD_CLOEXEC);
  for (const bool writes : {true, false}) {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring);
    if (writes)
      ::io_uring_prep_write(entry, fd, sent.data(), static_cast<unsigned>(sent.size()), 0);
    else
      ::io_uring_prep_read(entry, fd, back.data(), static_cast<unsigned>(back.size()), 0);
    io_uring_cqe* completion = nullptr;
    int result = ::io_uring_submit(&ring);
    while (result >= 0 && (result = ::io_uring_wait_cqe(&ring, &completion)) == -EINTR) {
    }
    if (result >= 0) {
      result = completion->res;
      ::io_uring_cqe_seen(&ring, completion);
    }
    if (fault.empty() && result < 0) fault = std::strerror(-result);
  }
  if (fault.empty() && back != sent) fault = "other bytes came back";
  if (fd >= 0) ::close(fd);
  ::io_uring_queue_exit(&ring);
  return fault;
}

}  // namespace tessera::io

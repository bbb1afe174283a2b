// Transfers by io_uring: one ring, and a thread that takes what the kernel has done.
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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
  // The kernel moved `moved` bytes, or said why not. What is left goes the ordinary way, which also words the error.
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

class UringQueue final : public Queue {
 public:
  explicit UringQueue(int depth) : depth_(depth) {
    const int result = ::io_uring_queue_init(static_cast<unsigned>(depth) + 1, &ring_, 0);  // one to wake the thread
    TESSERA_CHECK_IO(result == 0, "io", "cannot make a ring: ", std::strerror(-result));
    thread_ = std::thread([this] { take_completed(); });
  }
  ~UringQueue() override {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
      io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
      ::io_uring_prep_nop(entry);
      ::io_uring_sqe_set_data(entry, nullptr);
      submit();
    }
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
    const int before = flying_;
    for (; flying_ < depth_ && !waiting_.empty(); ++flying_) {
      Transfer& t = *waiting_.front().release();  // comes back by the completion
      waiting_.pop_front();
      io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
      const int fd = t.file->descriptor(t.memory, t.part(), t.offset);
      const auto bytes = static_cast<unsigned>(t.part());
      if (t.writes)
        ::io_uring_prep_write(entry, fd, t.memory, bytes, static_cast<uint64_t>(t.offset));
      else
        ::io_uring_prep_read(entry, fd, t.memory, bytes, static_cast<uint64_t>(t.offset));
      ::io_uring_sqe_set_data(entry, &t);
    }
    if (flying_ > before) submit();
  }

  // The kernel may lack memory for a moment; the entries stay in the ring.
  void submit() {
    while (::io_uring_submit(&ring_) < 0)
      std::this_thread::yield();
  }

  void take_completed() {
    for (;;) {
      io_uring_cqe* completion = nullptr;
      if (::io_uring_wait_cqe(&ring_, &completion) < 0) continue;  // a signal
      const int64_t moved = moved_by(completion);
      std::unique_ptr<Transfer> transfer(static_cast<Transfer*>(::io_uring_cqe_get_data(completion)));
      ::io_uring_cqe_seen(&ring_, completion);
      bool last = false;
      {
        const std::lock_guard lock(mutex_);
        if (transfer) --flying_;
        start_waiting();
        last = over_ && flying_ == 0;
      }
      if (transfer) transfer->finish(moved);
      if (last) return;
    }
  }

  const int depth_;
  io_uring ring_{};
  std::mutex mutex_;  // of what follows, and of the ring's submissions
  std::deque<std::unique_ptr<Transfer>> waiting_;
  int flying_ = 0;
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

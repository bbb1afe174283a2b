#include "tessera/io/queue.h"

#include <gtest/gtest.h>

#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tessera/base/error.h"
#include "tests/io/temp_folder.h"

struct io_uring;

namespace {
std::atomic<int> g_not_taken = 0;  // so many submissions of this process take nothing
}

// In the place of liburing's, where that is a shared library.
extern "C" int io_uring_submit(io_uring* ring) {
  if (g_not_taken > 0) return --g_not_taken, 0;
  static const auto submit = reinterpret_cast<int (*)(io_uring*)>(::dlsym(RTLD_NEXT, "io_uring_submit"));
  return submit(ring);
}

namespace tessera::io {
namespace {

// What TESSERA_IO asks for.
class Word {
 public:
  explicit Word(const char* word) { ::setenv("TESSERA_IO", word, 1); }
  ~Word() { ::unsetenv("TESSERA_IO"); }
};

// From now on the system refuses all threads of this process what io_uring needs for a transfer.
void refuse_transfers() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENXIO),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) != 0)
    std::exit(2);
}

}  // namespace

class Queues : public ::testing::TestWithParam<QueueKind> {
 protected:
  void SetUp() override {
    if (GetParam() == QueueKind::Uring && !test_uring().empty()) GTEST_SKIP() << "io_uring: " << test_uring();
  }
};

INSTANTIATE_TEST_SUITE_P(Kinds, Queues, ::testing::Values(QueueKind::Threads, QueueKind::Uring),
                         [](const auto& info) { return info.param == QueueKind::Threads ? "threads" : "uring"; });

// Blocks of every size and alignment, in any order, at any depth, past the page cache and through it.
TEST_P(Queues, BlocksComeBack) {
  std::mt19937 random(5);
  for (const bool direct : {false, true}) {
    for (const int depth : {1, 3, 64}) {
      const TempFolder folder;
      constexpr int64_t kBlock = 8192, kBlocks = 50;
      const AlignedBytes sent = aligned_bytes(kBlock * kBlocks), back = aligned_bytes(kBlock * kBlocks);
      for (int64_t i = 0; i < kBlock * kBlocks; ++i)
        sent[i] = static_cast<char>(random());
      // Each block whole, or cut somewhere.
      std::vector<std::pair<int64_t, int64_t>> parts;
      for (int64_t i = 0; i < kBlocks; ++i) {
        const auto cut = static_cast<int64_t>(i % 2 == 0 ? 0 : random() % kBlock);
        parts.emplace_back(i * kBlock, cut);
        parts.emplace_back(i * kBlock + cut, kBlock - cut);
      }
      std::shuffle(parts.begin(), parts.end(), random);
      const auto queue = make_queue(depth, GetParam());
      const auto all = [&](const auto& transfer) {
        std::vector<std::future<void>> done;
        for (const auto& [offset, bytes] : parts)
          done.push_back(transfer(offset, bytes));
        for (auto& one : done)
          one.get();
      };
      File out = direct ? File::create_direct(folder / "a") : File::create(folder / "a");
      if (direct) out.reserve(kBlock * kBlocks);
      all([&](int64_t offset, int64_t bytes) { return queue->write(out, sent.get() + offset, bytes, offset); });
      out.sync();
      const File in = direct ? File::open_direct(folder / "a") : File::open(folder / "a");
      EXPECT_EQ(in.size(), kBlock * kBlocks);
      all([&](int64_t offset, int64_t bytes) { return queue->read(in, back.get() + offset, bytes, offset); });
      EXPECT_EQ(std::memcmp(back.get(), sent.get(), kBlock * kBlocks), 0) << direct << depth;
    }
  }
}

TEST_P(Queues, ErrorsReachTheOneThatWaitsAndTheQueueGoesOn) {
  const TempFolder folder;
  const auto queue = make_queue(1, GetParam());
  File::create(folder / "a").write("abc", 3, 0);
  const File in = File::open(folder / "a");
  char bytes[8];
  auto beyond = queue->read(in, bytes, 8, 0);
  auto denied = queue->write(in, "x", 1, 0);
  auto within = queue->read(in, bytes, 3, 0);
  EXPECT_THROW(beyond.get(), IoError);
  EXPECT_THROW(denied.get(), IoError);
  within.get();
  EXPECT_EQ(std::string(bytes, 3), "abc");
}

// What was given to it is done when it is gone, whoever asked for the results.
TEST_P(Queues, ItsEndWaits) {
  const TempFolder folder;
  const std::string text(100'000, 'x');
  const File out = File::create(folder / "a");
  {
    const auto queue = make_queue(2, GetParam());
    for (int i = 0; i < 40; ++i)
      queue->write(out, text.data(), static_cast<int64_t>(text.size()), i * static_cast<int64_t>(text.size()));
  }
  EXPECT_EQ(out.size(), 4'000'000);
  EXPECT_EQ(read_text(folder / "a", 4'000'000), std::string(4'000'000, 'x'));
}

// An error of the system that lasts is one of every transfer, and the queue ends.
TEST(UringQueue, WhatTheSystemRefusesForGoodIsAnError) {
  if (!test_uring().empty()) GTEST_SKIP() << "io_uring: " << test_uring();
  const TempFolder folder;
  File::create(folder / "a").write("abc", 3, 0);
  const auto try_all = [&] {
    ::alarm(20);  // it waits for ever otherwise
    const File in = File::open(folder / "a");
    char bytes[3];
    {
      const auto queue = make_queue(2, QueueKind::Uring);
      queue->read(in, bytes, 3, 0).get();
      refuse_transfers();
      for (int i = 0; i < 5; ++i) {
        try {
          queue->read(in, bytes, 3, 0).get();
          std::exit(3);
        } catch (const IoError& error) {
          if (std::string(error.what()).find(in.path()) == std::string::npos) std::exit(4);
        }
      }
    }
    std::exit(0);
  };
  EXPECT_EXIT(try_all(), ::testing::ExitedWithCode(0), "");
}

// The kernel takes nothing of what is prepared. A few times: it is submitted again, and nothing is left behind; for good: an error.
TEST(UringQueue, WhatTheKernelHasNotTakenIsSubmittedAgainButNotForEver) {
  if (!test_uring().empty()) GTEST_SKIP() << "io_uring: " << test_uring();
  const TempFolder folder;
  File::create(folder / "a").write("abc", 3, 0);
  const auto try_all = [&](int times) {
    ::alarm(20);  // it waits for ever otherwise
    const File in = File::open(folder / "a");
    char bytes[3] = {};
    std::string error;
    {
      const auto queue = make_queue(2, QueueKind::Uring);
      g_not_taken = times;
      try {
        queue->read(in, bytes, 3, 0).get();
      } catch (const IoError& found) {
        error = found.what_without_backtrace();
      }
    }
    const bool taken = error.empty() && std::string(bytes, 3) == "abc" && g_not_taken == 0;
    const bool refused = error.find("io_uring takes no transfers") != std::string::npos;
    std::exit((times == 3 ? taken : refused) ? 0 : 3);
  };
  for (const int times : {3, std::numeric_limits<int>::max()})
    EXPECT_EXIT(try_all(times), ::testing::ExitedWithCode(0), "") << times;
}

TEST(QueueKinds, TheEnvironmentChooses) {
  const bool works = test_uring().empty();
  const QueueKind best = works ? QueueKind::Uring : QueueKind::Threads;
  EXPECT_EQ(chosen_queue(), best);
  const auto chosen = [](const char* word) {
    const Word set(word);
    return chosen_queue();
  };
  EXPECT_EQ(chosen("auto"), best);
  EXPECT_EQ(chosen("threads"), QueueKind::Threads);
  if (works) {
    EXPECT_EQ(chosen("uring"), QueueKind::Uring);
  } else {
    EXPECT_THROW(chosen("uring"), c10::ValueError);
  }
  EXPECT_THROW(chosen("libaio"), c10::ValueError);
}

}  // namespace tessera::io

#include "tessera/io/queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tests/io/temp_folder.h"

namespace tessera::io {

// Blocks of every size and alignment, in any order, at any depth, past the page cache and through it.
TEST(Queue, BlocksComeBack) {
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
      const auto queue = make_queue(depth);
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

TEST(Queue, ErrorsReachTheOneThatWaitsAndTheQueueGoesOn) {
  const TempFolder folder;
  const auto queue = make_queue(1);
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
TEST(Queue, ItsEndWaits) {
  const TempFolder folder;
  const std::string text(100'000, 'x');
  const File out = File::create(folder / "a");
  {
    const auto queue = make_queue(2);
    for (int i = 0; i < 40; ++i)
      queue->write(out, text.data(), static_cast<int64_t>(text.size()), i * static_cast<int64_t>(text.size()));
  }
  EXPECT_EQ(out.size(), 4'000'000);
  EXPECT_EQ(read_text(folder / "a", 4'000'000), std::string(4'000'000, 'x'));
}

}  // namespace tessera::io

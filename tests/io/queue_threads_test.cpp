#include <gtest/gtest.h>

#include <vector>

#include "tessera/base/error.h"
#include "tessera/io/queue.h"
#include "tests/io/temp_folder.h"

namespace tessera::io {
namespace {

TEST(Queue, BlocksInAnyOrderComeBack) {
  const TempFolder folder;
  constexpr int64_t kBlocks = 50, kBytes = 1000;
  std::vector<std::vector<char>> blocks;
  for (int64_t i = 0; i < kBlocks; ++i)
    blocks.emplace_back(kBytes, static_cast<char>(i));
  const auto queue = make_queue(4);
  File out = File::create(folder / "a");
  std::vector<std::future<void>> writes;
  for (int64_t i = kBlocks - 1; i >= 0; --i)
    writes.push_back(queue->write(out, blocks[i].data(), kBytes, i * kBytes));
  for (auto& write : writes)
    write.get();
  const File in = File::open(folder / "a");
  std::vector<char> all(kBlocks * kBytes);
  std::vector<std::future<void>> reads;
  for (int64_t i = 0; i < kBlocks; ++i)
    reads.push_back(queue->read(in, all.data() + i * kBytes, kBytes, i * kBytes));
  for (auto& read : reads)
    read.get();
  for (int64_t i = 0; i < kBlocks * kBytes; ++i)
    ASSERT_EQ(all[i], static_cast<char>(i / kBytes));
}

TEST(Queue, ErrorsReachTheOneThatWaitsAndTheQueueGoesOn) {
  const TempFolder folder;
  const auto queue = make_queue(1);
  File::create(folder / "a").write("abc", 3, 0);
  const File in = File::open(folder / "a");
  char bytes[8];
  auto beyond = queue->read(in, bytes, 8, 0);
  auto within = queue->read(in, bytes, 3, 0);
  EXPECT_THROW(beyond.get(), IoError);
  within.get();
  EXPECT_EQ(std::string(bytes, 3), "abc");
}

}  // namespace
}  // namespace tessera::io

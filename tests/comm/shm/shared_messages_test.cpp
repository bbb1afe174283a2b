#include "tessera/comm/shm/shared_messages.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "tests/comm/collectives.h"
#include "tests/comm/shared_files.h"

namespace tessera::comm {
namespace {

using testing::error_of;
using testing::message_of;
using testing::shared_files;

std::vector<PointToPointPtr> ranks(int size, const std::vector<bool>& near) {
  auto p2p = thread_point_to_point(size, std::chrono::seconds(30));
  for (auto& each : p2p)
    each = shared_messages(each, near, std::chrono::seconds(30));
  return p2p;
}

// Whether a tensor lies in memory of a segment.
bool is_mapped(const at::Tensor& tensor) {
  std::ifstream maps("/proc/self/maps");
  const auto place = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    if (begin <= place && place < end) return line.find("memfd:tessera") != std::string::npos;
  }
  return false;
}

int64_t open_segments() {
  int64_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:tessera") != std::string::npos ? 1 : 0;
  return count;
}

constexpr int64_t kLarge = 100'000;

TEST(SharedMessages, LargeOnesAreWrittenOnceAndMappedByWhoTakesThem) {
  const auto p2p = ranks(3, {true, true, true});
  const at::Tensor x = at::randn({kLarge}), shared = p2p[0]->share(x);
  EXPECT_TRUE(is_mapped(shared));
  for (const int to : {1, 2})
    p2p[0]->send(shared, to, 7, "x");
  at::Tensor first = p2p[1]->take({kLarge}, at::kFloat, 0, 7, "x");
  EXPECT_TRUE(is_mapped(first));
  EXPECT_TRUE(at::equal(first, x));
  first.zero_();
  EXPECT_TRUE(at::equal(p2p[2]->take({kLarge}, at::kFloat, 0, 7, "x"), x)) << "writes are the receiver's own";
  const at::Tensor column = at::arange(2 * kLarge).view({kLarge, 2}).select(1, 1);
  p2p[0]->send(p2p[0]->share(column), 1, 7, "y");
  at::Tensor copy = at::empty({kLarge}, at::kLong);
  p2p[1]->receive(copy, 0, 7, "y");
  EXPECT_TRUE(at::equal(copy, column));
}

TEST(SharedMessages, SmallOnesAndThoseOfOtherHostsGoTheirWay) {
  for (const auto& [near, size] : {std::pair(true, int64_t{10}), std::pair(false, kLarge)}) {
    const auto p2p = ranks(2, {near, near});
    const at::Tensor x = at::randn({size});
    std::thread sender([&, size = size] {
      const at::Tensor shared = p2p[0]->share(x);
      EXPECT_NE(shared.const_data_ptr(), x.const_data_ptr());
      p2p[0]->settle(p2p[0]->send(shared, 1, 0, "x"));
    });
    const at::Tensor got = p2p[1]->take({size}, at::kFloat, 0, 0, "x");
    sender.join();
    EXPECT_FALSE(is_mapped(got));
    EXPECT_TRUE(at::equal(got, x));
  }
}

TEST(SharedMessages, WhatIsTakenIsLetGoOf) {
  const auto before = shared_files();
  const auto p2p = ranks(2, {true, true});
  const int64_t open = open_segments();
  for (int i = 0; i < 20; ++i) {
    p2p[0]->send(p2p[0]->share(at::full({kLarge}, i)), 1, 0, "x");
    EXPECT_TRUE(at::equal(p2p[1]->take({kLarge}, at::kLong, 0, 0, "x"), at::full({kLarge}, i)));
    EXPECT_LE(open_segments() - open, 1) << i;
  }
  const int64_t number = p2p[0]->send(at::ones({kLarge}), 1, 0, "x");
  EXPECT_EQ(open_segments() - open, 1);
  const at::Tensor kept = p2p[1]->take({kLarge}, at::kFloat, 0, 0, "x");
  p2p[0]->settle(number);
  EXPECT_EQ(open_segments() - open, 1) << "the receiver's";
  EXPECT_TRUE(at::equal(kept, at::ones({kLarge})));
  EXPECT_EQ(shared_files(), before);
}

// Who leaves after a flush takes nothing along.
TEST(SharedMessages, AFlushWaitsUntilAllAreMapped) {
  for (const int64_t timeout : {100, 30'000}) {
    auto p2p = thread_point_to_point(2, std::chrono::seconds(30));
    for (auto& each : p2p)
      each = shared_messages(each, {true, true}, std::chrono::milliseconds(timeout));
    const std::string lost = timeout < 1000 ? "rank 1 did not take a message within 100 ms" : "";
    std::thread sender([&] {
      p2p[0]->send(at::ones({kLarge}), 1, 0, "x");
      EXPECT_HAS(error_of([&] { p2p[0]->flush(); }), lost);
      p2p[0].reset();
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (lost.empty()) {
      EXPECT_TRUE(at::equal(p2p[1]->take({kLarge}, at::kFloat, 0, 0, "x"), at::ones({kLarge})));
    }
    sender.join();
  }
}

// A page that the system cannot give would end the process.
TEST(SharedMessages, WhatThereIsNoMemoryForIsAnError) {
  const auto p2p = ranks(2, {true, true});
  const at::Tensor huge = at::zeros({1}).expand({int64_t{1} << 43});
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { p2p[0]->share(huge); }), "B are needed");
}

// A descriptor is used again: its new file is not the message.
TEST(SharedMessages, AnotherFileIsNotTakenForAMessage) {
  const auto inner = thread_point_to_point(2, std::chrono::seconds(30));
  const auto receiver = shared_messages(inner[1], {true, true}, std::chrono::seconds(30));
  inner[0]->send(at::tensor({static_cast<int64_t>(getpid()), int64_t{0}, int64_t{1}}, at::kLong), 1, 0, "x");
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { receiver->take({kLarge}, at::kFloat, 0, 0, "x"); }),
             "shared memory");
}

}  // namespace
}  // namespace tessera::comm

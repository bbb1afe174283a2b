#include "tessera/comm/group.h"

#include "tessera/comm/backends.h"
#include "tests/comm/collectives.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using testing::message_of;

// Argument errors come before anything is sent, so one rank of two is enough to see them.
struct GroupArguments : ::testing::Test {
  std::vector<GroupPtr> groups = thread_groups(2);
  Group& group = *groups[1];
};

TEST_F(GroupArguments, SizesMustFit) {
  const auto gather = message_of<c10::ValueError>([&] { group.all_gather(at::zeros({7}), at::zeros({3}), "unit a"); });
  EXPECT_HAS(gather, "[comm] all_gather (unit a): 'out' has 7 elements");
  const auto scatter = message_of<c10::ValueError>(
      [&] { group.reduce_scatter(at::zeros({3}), at::zeros({7}), ReduceOp::Sum, "unit b"); });
  EXPECT_HAS(scatter, "[comm] reduce_scatter (unit b): 'in' has 7 elements");
}

TEST_F(GroupArguments, DtypesMustFit) {
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_gather(at::zeros({6}, at::kInt), at::zeros({3})); }),
             "one dtype");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_reduce(at::zeros({6}, at::kInt), ReduceOp::Avg); }),
             "Avg takes floating tensors");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_reduce(at::zeros({6}, at::kComplexFloat), ReduceOp::Sum); }),
             "does not take dtype");
}

TEST_F(GroupArguments, TensorsMustBeContiguousAndDefined) {
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_reduce(at::zeros({4, 4}).t(), ReduceOp::Sum, "w"); }),
             "all_reduce (w): 'tensor' must be contiguous");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.broadcast(at::Tensor(), 0); }), "undefined");
}

TEST_F(GroupArguments, DevicesMustFit) {
  const auto meta = at::zeros({6}, at::TensorOptions(at::kMeta));
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_gather(at::zeros({6}), meta.narrow(0, 0, 3)); }),
             "one device");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.broadcast(meta, 0, "m"); }), "CPU tensors");
}

TEST_F(GroupArguments, RootAndSplitsAreChecked) {
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.broadcast(at::zeros({1}), 2); }), "root 2");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.broadcast(at::zeros({1}), -1); }), "root -1");
  const auto t = at::zeros({3, 2});
  const auto u = at::zeros({3, 2});
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_to_all(at::zeros({3}), at::zeros({3})); }), "not divisible");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_to_all(t, u, {1, 2}, {1, 1}); }), "add up to 2 rows");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_to_all(t, u, {1, 2}, {3}); }), "1 splits for 2 ranks");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_to_all(t, u, {1, 2}, {4, -1}); }), "negative");
}

TEST_F(GroupArguments, OnlyTheOwnPartMayBeUsedInPlace) {
  const auto full = at::zeros({8});
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_gather(full, full.narrow(0, 0, 4)); }), "only part 1");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.reduce_scatter(full.narrow(0, 2, 4), full, ReduceOp::Sum); }),
             "overlaps the large one at byte 8");
  EXPECT_HAS(message_of<c10::ValueError>([&] { group.all_to_all(full, full); }), "overlap");
}

TEST(GroupStats, CountCallsAndPayload) {
  testing::run_ranks(4, [](int, GroupPtr group) {
    const auto part = at::ones({100}), full = at::ones({400});
    group->all_gather(full, part).wait();
    group->all_gather(full, part).wait();
    group->reduce_scatter(part, full, ReduceOp::Sum).wait();
    group->all_reduce(full, ReduceOp::Sum).wait();
    group->broadcast(full, 0).wait();
    group->all_to_all(full, at::ones({400})).wait();
    group->barrier();
    const auto stats = group->stats();
    EXPECT_EQ(stats.all_gather.calls, 2);
    EXPECT_EQ(stats.all_gather.bytes, 2 * 1200);
    EXPECT_EQ(stats.reduce_scatter.calls, 1);
    EXPECT_EQ(stats.reduce_scatter.bytes, 1200);
    EXPECT_EQ(stats.all_reduce.bytes, 2400);
    EXPECT_EQ(stats.broadcast.bytes, 1600);
    EXPECT_EQ(stats.all_to_all.bytes, 1200);
    EXPECT_EQ(stats.barrier.calls, 1);
    group->reset_stats();
    EXPECT_EQ(group->stats().all_gather.calls, 0);
  });
}

struct CountingWork : Pending::Work {
  CountingWork(int& waits, bool fails) : waits(waits), fails(fails) {}
  void wait() override {
    ++waits;
    if (fails) throw std::runtime_error("lost");
  }
  bool wait_for(std::chrono::milliseconds) override { return false; }
  int& waits;
  bool fails;
};

TEST(Pending, WaitsOnceAndIsDoneAfterwards) {
  int waits = 0;
  Pending pending(std::make_unique<CountingWork>(waits, false));
  EXPECT_FALSE(pending.done());
  pending.wait();
  pending.wait();
  EXPECT_TRUE(pending.done());
  EXPECT_EQ(waits, 1);
  EXPECT_TRUE(Pending().done());
}

TEST(Pending, AFailureIsThrownOnce) {
  int waits = 0;
  Pending pending(std::make_unique<CountingWork>(waits, true));
  EXPECT_THROW(pending.wait(), std::runtime_error);
  EXPECT_TRUE(pending.done());
  EXPECT_NO_THROW(pending.wait());
}

TEST(Pending, DroppingAndReplacingWaitAndSwallow) {
  int waits = 0;
  {
    Pending pending(std::make_unique<CountingWork>(waits, true));
  }
  EXPECT_EQ(waits, 1);
  Pending pending(std::make_unique<CountingWork>(waits, true));
  pending = Pending(std::make_unique<CountingWork>(waits, false));
  EXPECT_EQ(waits, 2);
  EXPECT_FALSE(pending.done());
  Pending moved = std::move(pending);
  EXPECT_TRUE(pending.done());  // NOLINT(bugprone-use-after-move): a moved-from handle is complete
}

}  // namespace
}  // namespace tessera::comm

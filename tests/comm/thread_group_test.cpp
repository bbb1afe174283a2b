#include <atomic>
#include <barrier>
#include <future>

#include "tests/comm/collectives.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::launch_call;
using testing::message_of;
using testing::run_ranks;
using testing::same_bits;

class ThreadGroup : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ThreadGroup, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(ThreadGroup, EveryCollectiveOverSizesAndDtypes) {
  run_ranks(GetParam(), [](int, GroupPtr group) {
    int call = 0;
    for (const int64_t n : {0, 1, 3, 17, 4096}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong, at::kByte}) {
        for (int kind = 0; kind < 5; ++kind) {
          ++call;
          auto l = launch_call(*group, call, kind, n, dtype, ReduceOp::Sum, call % 2 == 0);
          l.pending.wait();
          EXPECT_TRUE(same_bits(l.got, l.want)) << kind << " " << n << " " << dtype;
        }
      }
    }
  });
}

TEST_P(ThreadGroup, EveryReduction) {
  run_ranks(GetParam(), [](int, GroupPtr group) {
    int call = 0;
    for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max}) {
      for (const int kind : {1, 2}) {
        for (const bool in_place : {false, true}) {
          auto l = launch_call(*group, ++call, kind, 1030, at::kBFloat16, op, in_place);
          l.pending.wait();
          EXPECT_TRUE(same_bits(l.got, l.want)) << kind << " " << static_cast<int>(op) << " " << in_place;
        }
      }
    }
  });
}

TEST_P(ThreadGroup, ReduceScatterAndAllReduceGiveTheSameBits) {
  const int size = GetParam();
  run_ranks(size, [size](int rank, GroupPtr group) {
    auto whole = testing::input(7, rank, 333 * size, at::kFloat);
    auto parts = whole.clone();
    auto part = parts.narrow(0, rank * 333, 333);
    group->all_reduce(whole, ReduceOp::Avg).wait();
    group->reduce_scatter(part, parts, ReduceOp::Avg).wait();
    EXPECT_TRUE(same_bits(whole.narrow(0, rank * 333, 333), part));
  });
}

TEST(ThreadGroups, LaunchingDoesNotBlockAndAnyOrderOfWaitsWorks) {
  const auto a = thread_groups(2), b = thread_groups(2);
  std::thread other([&] {
    auto x = at::ones({10}), y = at::ones({10});
    auto first = a[1]->all_reduce(x, ReduceOp::Sum);
    auto second = b[1]->all_reduce(y, ReduceOp::Sum);
    second.wait();
    first.wait();
    EXPECT_EQ(x.sum().item<float>(), 20.0f);
  });
  auto x = at::ones({10}), y = at::ones({10});
  auto first = a[0]->all_reduce(x, ReduceOp::Sum);
  first.wait();
  auto second = b[0]->all_reduce(y, ReduceOp::Sum);
  second.wait();
  other.join();
  EXPECT_EQ(y.sum().item<float>(), 20.0f);
}

TEST(ThreadGroups, TheFirstCauseStays) {
  const auto groups = thread_groups(2);
  groups[0]->abort("first");
  groups[1]->abort("second");
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { groups[1]->barrier(); }), "rank 0 aborted: first");
}

TEST(ThreadGroups, AFinishedRankDoesNotHarmItsCalls) {
  auto groups = thread_groups(2);
  auto x = at::ones({4}), y = at::ones({4});
  auto theirs = groups[1]->all_reduce(x, ReduceOp::Sum);
  groups.pop_back();  // the handle lives on
  groups[0]->all_reduce(y, ReduceOp::Sum).wait();
  theirs.wait();
  EXPECT_EQ(y.sum().item<float>(), 8.0f);
}

TEST(ThreadGroups, DifferentCallsAreNamed) {
  run_ranks(2, [](int rank, GroupPtr group) {
    auto t = at::ones({1024}), part = at::ones({512});
    const auto text = message_of<c10::DistBackendError>([&] {
      auto pending =
          rank == 0 ? group->all_gather(t, part, "unit x") : group->reduce_scatter(part, t, ReduceOp::Sum, "unit y");
      pending.wait();
    });
    EXPECT_HAS(text,
               "rank 0 called all_gather (unit x, 4096 B, Float), rank 1 called reduce_scatter "
               "(unit y, 4096 B, "
               "Float, sum)");
  });
}

TEST(ThreadGroups, DifferentSizesDtypesAndSplitsAreNamed) {
  run_ranks(2, [](int rank, GroupPtr group) {
    auto t = at::ones({rank == 0 ? 8 : 9});
    const auto text = message_of<c10::DistBackendError>([&] { group->all_reduce(t, ReduceOp::Sum, "w").wait(); });
    EXPECT_HAS(text,
               "rank 0 called all_reduce (w, 32 B, Float, sum), rank 1 called all_reduce (w, 36 B, "
               "Float, sum)");
  });
  run_ranks(2, [](int rank, GroupPtr group) {
    auto t = at::ones({4}), u = at::ones({4});
    const auto text = message_of<c10::DistBackendError>([&] {
      group->all_to_all(t, u, {2, 2}, rank == 0 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{2, 2}).wait();
    });
    EXPECT_HAS(text, "rank 0 sends 4 B to rank 0, which expects 8 B");
  });
}

TEST(ThreadGroups, ALateRankIsNamedAfterTheTimeout) {
  std::promise<void> done;
  auto wait_done = done.get_future().share();
  std::atomic<int> failed = 0;
  std::barrier both(2);
  run_ranks(
      3,
      [&](int rank, GroupPtr group) {
        if (rank == 1) {
          wait_done.wait();
          EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier("mine"); }), "timed out");
          return;
        }
        both.arrive_and_wait();
        const auto text = message_of<c10::DistBackendError>([&] { group->barrier("step"); });
        EXPECT_HAS(text, "timed out waiting for rank(s) 1 in barrier (step, 0 B)");
        if (++failed == 2) done.set_value();
      },
      1s);
}

TEST(ThreadGroups, RefuseAnEmptyGroup) {
  EXPECT_THROW(thread_groups(0), c10::ValueError);
}

TEST(RunRanks, RethrowsTheFirstOriginalErrorAndEndsTheOthers) {
  try {
    run_ranks(4, [](int rank, GroupPtr group) {
      if (rank == 2) throw std::out_of_range("the original");
      group->barrier();
    });
    FAIL() << "nothing was thrown";
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "the original");
  }
}

}  // namespace
}  // namespace tessera::comm

#include "tessera/comm/c10d/group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <latch>

#include "tessera/comm/backends.h"
#include "tests/comm/c10d/gloo_threads.h"
#include "tests/comm/collectives.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using testing::message_of;
using testing::run_gloo_threads;
using testing::same_bits;

TEST(C10dGroup, TheNativePathUsesTheCollectivesOfTheBackEnd) {
  run_gloo_threads(2, [](int rank, testing::TorchGroup torch) {
    const auto group = make_c10d_group(nullptr, torch, C10dPath::Native);
    int call = 0;
    for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max}) {
      for (const int kind : {0, 1, 2, 3, 4}) {
        auto l = testing::launch_call(*group, ++call, kind, 500, at::kFloat, op, false);
        l.pending.wait();
        EXPECT_TRUE(same_bits(l.got, l.want)) << kind;  // two ranks: one order of summation
      }
    }
    group->barrier();
  });
}

TEST(C10dGroup, GroupsOverOneProcessGroupDoNotMixWhateverTheOrder) {
  run_gloo_threads(2, [](int rank, testing::TorchGroup torch) {
    const auto first = make_c10d_group(nullptr, torch, C10dPath::ByDevice);
    const auto second = make_c10d_group(nullptr, torch, C10dPath::ByDevice);
    at::Tensor a = at::full({100000}, 1.0 + rank), b = at::full({100000}, 10.0 + rank);
    // Two engines whose units become ready in another order on the other rank.
    auto one = rank == 0 ? first->all_reduce(a, ReduceOp::Sum) : second->all_reduce(b, ReduceOp::Sum);
    auto other = rank == 0 ? second->all_reduce(b, ReduceOp::Sum) : first->all_reduce(a, ReduceOp::Sum);
    auto& pending_a = rank == 0 ? one : other;
    auto& pending_b = rank == 0 ? other : one;
    pending_a.wait();
    pending_b.wait();
    EXPECT_TRUE(a.equal(at::full({100000}, 3.0)));
    EXPECT_TRUE(b.equal(at::full({100000}, 21.0)));
    first->barrier();
  });
}

TEST(C10dGroup, IsFoundByName) {
  run_gloo_threads(2, [](int rank, testing::TorchGroup torch) {
    const std::string name = "tessera_test_" + std::to_string(rank);
    c10d::register_process_group(name, torch);
    const auto group = c10d_group(name);
    EXPECT_EQ(group->name(), "shared memory");  // the ranks share a host
    EXPECT_EQ(group->rank(), rank);
    EXPECT_EQ(group->size(), 2);
    group->barrier();
    c10d::unregister_process_group(name);
  });
  EXPECT_HAS(message_of<c10::ValueError>([] { c10d_group("nobody"); }),
             "[comm] no torch process group is registered under 'nobody'");
}

TEST(C10dGroup, CountsLikeEveryOtherGroup) {
  run_gloo_threads(2, [](int, testing::TorchGroup torch) {
    const auto group = make_c10d_group(nullptr, torch, C10dPath::ByDevice);
    auto t = at::ones({1000});
    group->all_reduce(t, ReduceOp::Sum).wait();
    group->barrier();
    EXPECT_EQ(group->stats().all_reduce.calls, 1);
    EXPECT_EQ(group->stats().all_reduce.bytes, 4000);
  });
}

TEST(C10dGroup, AnAbortFromAnotherThreadEndsAWait) {
  std::latch over(1);
  run_gloo_threads(2, [&](int rank, testing::TorchGroup torch) {
    const auto group = make_c10d_group(nullptr, torch, C10dPath::ByDevice);
    group->barrier();
    if (rank == 1) return over.wait();
    auto t = at::ones({8});
    auto pending = group->all_reduce(t, ReduceOp::Sum, "stuck");
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      group->abort("user pressed stop");
    });
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { pending.wait(); }), "rank 0 aborted: user pressed stop");
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->all_reduce(t, ReduceOp::Sum, "next"); }),
               "all_reduce (next, 32 B) failed");
    other.join();
    over.count_down();
  });
}

}  // namespace
}  // namespace tessera::comm

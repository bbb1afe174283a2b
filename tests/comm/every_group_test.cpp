// What every back end does alike, over ranks that are threads.
#include <future>
#include <latch>

#include "tessera/comm/shm/group.h"
#include "tests/comm/collectives.h"
#include "tests/comm/hosts/threads.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::message_of;
using testing::same_bits;

using RankBody = std::function<void(int, GroupPtr)>;

// body() of a rank whose data may not outlive it: it stays until all have ended.
class StayingRanks {
 public:
  explicit StayingRanks(int size) : ended_(size) {}
  void run(const RankBody& body, int rank, GroupPtr group) {
    const GroupPtr alive = group->sibling();
    try {
      body(rank, std::move(group));
    } catch (...) {
      ended_.count_down();
      throw;
    }
    ended_.arrive_and_wait();
  }

 private:
  std::latch ended_;
};

void over_threads(int size, const RankBody& body) {
  testing::run_ranks(size, body);
}

void over_shm(int size, const RankBody& body) {
  testing::run_threads(shm_thread_groups(size, 2min), body);
}

void over_gloo(int size, const RankBody& body) {
  StayingRanks ranks(size);
  testing::run_gloo_threads(size, [&](int rank, testing::TorchGroup torch) {
    ranks.run(body, rank, make_c10d_group(nullptr, std::move(torch), C10dPath::ByDevice));
  });
}

// The collectives of the back end itself, as those of a device.
void over_native_gloo(int size, const RankBody& body) {
  StayingRanks ranks(size);
  testing::run_gloo_threads(size, [&](int rank, testing::TorchGroup torch) {
    ranks.run(body, rank, make_c10d_group(nullptr, std::move(torch), C10dPath::Native));
  });
}

// On two hosts, in turns.
void over_hosts(int size, const RankBody& body) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank)
    host_of.push_back(rank % 2);
  StayingRanks ranks(size);
  testing::run_hosts(host_of, [&](int rank, ShmSharePtr here, const std::function<GroupPtr()>& between) {
    ranks.run(body, rank, hosts_group({host_of}, rank, std::move(here), between));
  });
}

struct BackEnd {
  const char* name;
  void (*run)(int size, const RankBody& body);
  int size = 2;     // of EveryGroupOfSize
  int calls = 0;    // random ones
  int largest = 0;  // of their tensors
};
void PrintTo(const BackEnd& back_end, std::ostream* out) {
  *out << back_end.name;
}
const BackEnd kOverThreads{"threads", &over_threads}, kOverShm{"shm", &over_shm}, kOverGloo{"gloo", &over_gloo},
    kOverHosts{"hosts", &over_hosts};

struct EveryGroup : ::testing::TestWithParam<BackEnd> {
  void run(int size, const RankBody& body) { GetParam().run(size, body); }
};
std::string back_end_name(const ::testing::TestParamInfo<BackEnd>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Over, EveryGroup, ::testing::Values(kOverThreads, kOverShm, kOverGloo, kOverHosts),
                         back_end_name);

// Ranks that share memory: they see at once what another one does.
struct EveryLocalGroup : EveryGroup {};
INSTANTIATE_TEST_SUITE_P(Over, EveryLocalGroup, ::testing::Values(kOverThreads, kOverShm), back_end_name);

struct EveryGroupOfSize : EveryGroup {};
std::vector<BackEnd> back_ends_of_sizes() {
  std::vector<BackEnd> all;
  for (const int size : {1, 2, 3, 4, 5, 8}) {
    all.push_back({"threads", &over_threads, size, 1000, 1500});
    if (size > 1) all.push_back({"shm", &over_shm, size, 300, 20011});
    if (size < 4 || size == 5) all.push_back({"gloo", &over_gloo, size, 120, 20011});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Over, EveryGroupOfSize, ::testing::ValuesIn(back_ends_of_sizes()),
                         [](const auto& info) { return c10::str(info.param.name, "_", info.param.size); });

TEST_P(EveryGroupOfSize, RandomCollectivesInFlight) {
  run(GetParam().size, [](int, GroupPtr group) {
    testing::random_collectives(*group, GetParam().calls, 11, GetParam().largest);
    group->barrier();
  });
}

// Of all sizes, in all_reduce and reduce_scatter.
TEST_P(EveryGroupOfSize, GivesTheBitsOfTheThreadGroup) {
  const int size = GetParam().size;
  for (const int64_t n : {300, 40000, 1300000}) {
    std::vector<at::Tensor> want(size), got(size);
    over_threads(size, [&](int rank, GroupPtr group) {
      want[rank] = testing::input(1, rank, n, at::kBFloat16);
      group->all_reduce(want[rank], ReduceOp::Avg).wait();
    });
    run(size, [&](int rank, GroupPtr group) {
      got[rank] = testing::input(1, rank, n, at::kBFloat16);
      auto small = got[rank].narrow(0, 0, 300).clone();
      auto parts = got[rank].narrow(0, 0, n / size * size).clone(), part = at::empty({n / size}, at::kBFloat16);
      group->all_reduce(got[rank], ReduceOp::Avg).wait();
      group->all_reduce(small, ReduceOp::Avg).wait();
      group->reduce_scatter(part, parts, ReduceOp::Avg).wait();
      EXPECT_TRUE(same_bits(small, got[rank].narrow(0, 0, 300)));
      EXPECT_TRUE(same_bits(part, got[rank].narrow(0, rank * (n / size), n / size).clone()));
    });
    for (int rank = 0; rank < size; ++rank)
      EXPECT_TRUE(same_bits(want[rank], got[rank]));
  }
}

TEST_P(EveryGroup, LaunchingDoesNotBlockHoweverMuchIsInFlight) {
  run(2, [](int rank, GroupPtr group) {
    std::vector<at::Tensor> data;
    std::vector<Pending> pending;
    for (int i = 0; i < 100; ++i) {
      data.push_back(at::full({100000 + i}, 1.0f + rank));
      pending.push_back(group->all_reduce(data.back(), ReduceOp::Sum, "x"));
    }
    for (Pending& p : pending)
      p.wait();
    for (const at::Tensor& t : data)
      EXPECT_TRUE(t.eq(3).all().item<bool>());
  });
}

TEST_P(EveryGroup, ARankThatHasLaunchedDoesNotHoldUpTheOthers) {
  std::latch through(2);
  run(3, [&](int rank, GroupPtr group) {
    auto part = at::ones({10}), whole = at::ones({30});
    auto pending = group->all_gather(whole, part);
    if (rank == 2) through.wait();  // looks after its handle when the others have their results
    pending.wait();
    if (rank != 2) through.count_down();
  });
}

// Of a group and a sibling, and of two siblings.
struct EveryGroupWithSiblings : EveryGroup {};
INSTANTIATE_TEST_SUITE_P(Over, EveryGroupWithSiblings,
                         ::testing::Values(kOverThreads, kOverShm, kOverGloo, BackEnd{"native_gloo", &over_native_gloo},
                                           kOverHosts),
                         back_end_name);

TEST_P(EveryGroupWithSiblings, MayBeLaunchedAndWaitedForInAnyOrder) {
  run(4, [](int rank, GroupPtr group) {
    const auto sibling = group->sibling(), another = group->sibling();
    const auto opposite = [&](Group& of_a, Group& of_b, int64_t size_a, int64_t size_b) {
      at::Tensor a = at::full({size_a}, 1.0f + rank), b = at::full({size_b}, 10.0f + rank);
      const auto one = [&] { return of_a.all_reduce(a, ReduceOp::Sum, "a"); };
      const auto other = [&] { return of_b.all_reduce(b, ReduceOp::Sum, "b"); };
      auto first = rank % 2 == 0 ? one() : other();
      auto second = rank % 2 == 0 ? other() : one();
      // Over Gloo wait() sends the second round of a large call, so that waits have an order there.
      if (GetParam().run == &over_gloo && rank % 2 == 1) std::swap(first, second);
      first.wait();
      second.wait();
      EXPECT_TRUE(a.eq(10).all().item<bool>()) << size_a << " " << size_b;
      EXPECT_TRUE(b.eq(46).all().item<bool>()) << size_a << " " << size_b;
    };
    const int64_t large = 2000000;  // more than a ring of shared memory holds
    opposite(*group, *sibling, large, large);
    opposite(*sibling, *another, 1000, large);
    opposite(*another, *group, 1000, 1000);
    EXPECT_EQ(group->stats().all_reduce.calls, 6);
  });
}

// As an engine that is destroyed with its process going on: others are still in a call when the first lets go.
TEST_P(EveryGroupWithSiblings, EndWithoutTheOthers) {
  run(3, [](int rank, GroupPtr group) {
    for (int turn = 0; turn < 3; ++turn) {
      auto sibling = group->sibling();
      at::Tensor t = at::full({300000}, 1.0f + rank);
      if (rank == turn) std::this_thread::sleep_for(100ms);
      sibling->all_reduce(t, ReduceOp::Sum).wait();
      EXPECT_TRUE(t.eq(6).all().item<bool>());
      if (rank == turn) sibling.reset();  // the others' go with the scope, a call of the group later
      group->barrier();
    }
  });
}

TEST_P(EveryGroup, HandlesMayOutliveTheGroupAndMayBeDropped) {
  run(2, [](int, GroupPtr group) {
    auto t = at::ones({50000}), u = at::ones({50000});
    auto pending = group->all_reduce(t, ReduceOp::Sum);
    {
      auto dropped = group->all_reduce(u, ReduceOp::Sum);
    }
    group.reset();
    pending.wait();
    EXPECT_TRUE(t.eq(2).all().item<bool>());
    EXPECT_TRUE(u.eq(2).all().item<bool>());
  });
}

// What a rank lets go of, or an exception does, waits for nobody, and the others' calls of the same need nothing more of it.
TEST_P(EveryGroup, ReleasedHandlesWaitForNoOther) {
  std::promise<void> released;
  run(2, [&](int rank, GroupPtr group) {
    const auto sibling = group->sibling();
    const auto gather = [&](int64_t count) {
      return sibling->all_gather(at::zeros({2 * count}), at::full({count}, 1.0f + rank), "left");
    };
    if (rank == 0) {
      for (const int64_t count : {1000, 60000}) {
        Pending pending = gather(count);
        pending.release();
        EXPECT_TRUE(pending.done());
        const auto fails = [&] {
          const Pending dropped = gather(count);
          throw std::runtime_error("amid it");
        };
        EXPECT_THROW(fails(), std::runtime_error);
      }
      Pending().release();
      released.set_value();
    } else {
      const bool in_time = released.get_future().wait_for(20s) == std::future_status::ready;
      EXPECT_TRUE(in_time);
      for (const int64_t count : {1000, 1000, 60000, 60000}) {
        const at::Tensor all = at::zeros({2 * count});
        sibling->all_gather(all, at::full({count}, 2.0f), "left").wait();
        EXPECT_EQ(all.sum().item<float>(), 3.0f * count);
      }
    }
    at::Tensor t = at::ones({5});
    group->all_reduce(t, ReduceOp::Sum, "afterwards").wait();
    EXPECT_TRUE(t.eq(2).all().item<bool>());
  });
}

TEST_P(EveryGroup, TakesParametersThatRequireGrad) {
  run(2, [](int rank, GroupPtr group) {
    auto parameter = at::full({30000}, static_cast<float>(rank)).requires_grad_();
    const auto version = parameter._version();
    group->broadcast(parameter, 1).wait();
    EXPECT_EQ(parameter.detach().sum().item<float>(), 30000.0f);
    EXPECT_EQ(parameter._version(), version);
  });
}

TEST_P(EveryGroup, AnAbortReachesTheOthersWithItsReason) {
  run(3, [](int rank, GroupPtr group) {
    if (rank == 2) {
      std::this_thread::sleep_for(50ms);
      return group->abort("disk on fire");
    }
    auto t = at::ones({8});
    auto pending = group->all_reduce(t, ReduceOp::Sum, "gradients of 'b'");
    const auto text = message_of<c10::DistBackendError>([&] { pending.wait(); });
    EXPECT_HAS(text, c10::str("[comm] rank ", rank, " of 3: all_reduce (gradients of 'b', 32 B) failed"));
    EXPECT_HAS(text, "rank 2 aborted: disk on fire");
    const auto later = message_of<c10::DistBackendError>([&] { group->barrier("later"); });
    EXPECT_HAS(later, "barrier (later, 0 B) failed");
    EXPECT_HAS(later, "rank 2 aborted: disk on fire");
  });
}

TEST_P(EveryLocalGroup, ADestroyedOneFailsThoseWhoWaitForIt) {
  run(2, [](int rank, GroupPtr group) {
    group->barrier();
    if (rank == 1) return;  // the group dies with the thread
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier("second"); }), "rank 1 destroyed its group");
  });
}

TEST_P(EveryLocalGroup, DifferentCallsAreNamed) {
  run(3, [](int rank, GroupPtr group) {
    const auto text = message_of<c10::DistBackendError>([&] {
      auto whole = at::ones({1200}), part = at::ones({400});
      group->all_gather(whole, part, rank < 2 ? "unit x" : "unit y").wait();
    });
    EXPECT_HAS(text, "called all_gather (unit x, 4800 B, Float), rank 2 called all_gather (unit y, 4800 B, Float)");
  });
}

TEST_P(EveryLocalGroup, AWaitCycleIsNamed) {
  for (const int size : {2, 3})
    run(size, [](int, GroupPtr group) { testing::expect_cycle(*group); });
  run(2, [](int, GroupPtr group) { testing::expect_no_cycle(*group, 2500ms); });
}

}  // namespace
}  // namespace tessera::comm

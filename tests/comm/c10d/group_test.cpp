#include "tessera/comm/c10d/group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>

#include <latch>

#include "tessera/base/error.h"
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

// Gloo, but for what a test says.
struct Faulty final : c10d::ProcessGroupGloo {
  enum Fault { CannotSplit, SplitThrows, AbortThrows };
  Faulty(const testing::TorchGroup& like, Fault of, const std::string& prefix = "faulty")
      : ProcessGroupGloo(c10::make_intrusive<c10d::PrefixStore>(prefix, like->getStore()), like->getRank(),
                         like->getSize(), gloo_of(like)->getOptions()),
        fault(of),
        group(like) {}

  static ProcessGroupGloo* gloo_of(const testing::TorchGroup& group) {
    return dynamic_cast<ProcessGroupGloo*>(group->getBackend(c10::DeviceType::CPU).get());
  }
  bool supportsSplitting() const override { return fault != CannotSplit; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Backend::Options>& options) override {
    TORCH_CHECK(fault != SplitThrows || getRank() != 1, "no memory for a communicator");
    if (fault == AbortThrows) return c10::make_intrusive<Faulty>(group, fault, "faulty split");
    return ProcessGroupGloo::split(store, ranks, options);
  }
  void abort() override { TORCH_CHECK(fault != AbortThrows, "the device is lost"); }

  const Fault fault;
  const testing::TorchGroup group;
};

// `torch` with such a back end in place of its own; the first keeps what that needs.
std::pair<testing::TorchGroup, testing::TorchGroup> faulty(testing::TorchGroup torch, Faulty::Fault fault) {
  using Group = c10d::ProcessGroup;
  auto group = c10::make_intrusive<Group>(torch->getStore(), torch->getRank(), torch->getSize());
  group->setBackend(c10::DeviceType::CPU, Group::BackendType::GLOO, c10::make_intrusive<Faulty>(torch, fault));
  group->setDefaultBackend(Group::BackendType::GLOO);
  group->setGroupName("faulty");
  return {std::move(torch), std::move(group)};
}

TEST(C10dGroup, ASiblingThatOneRankCannotMakeIsAnErrorOfAll) {
  run_gloo_threads(3, [](int rank, testing::TorchGroup torch) {
    const auto [below, above] = faulty(std::move(torch), Faulty::SplitThrows);
    const auto group = make_c10d_group(nullptr, above, C10dPath::Native);
    const auto begin = std::chrono::steady_clock::now();
    const auto text = message_of<c10::DistBackendError>([&] { group->sibling(); });
    EXPECT_HAS(text, "sibling (for tensors of cpu, 0 B) failed");
    EXPECT_HAS(text, "no memory for a communicator");
    EXPECT_HAS(text, "rank 1");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { group->barrier(); }), "no memory for a communicator");
  });
}

TEST(C10dGroup, ABackEndThatCannotBeSplitIsNamed) {
  run_gloo_threads(2, [](int, testing::TorchGroup torch) {
    const auto [below, above] = faulty(std::move(torch), Faulty::CannotSplit);
    const auto native = make_c10d_group(nullptr, above, C10dPath::Native);
    EXPECT_HAS(message_of<c10::NotImplementedError>([&] { native->sibling(); }), "'gloo' of cpu cannot be split");
    EXPECT_HAS(message_of<c10::ValueError>([&] { native->sibling(c10::kCUDA); }), "no back end for tensors of cuda");
    native->barrier();                                                                     // it is well
    const auto messages = make_c10d_group(nullptr, above, C10dPath::ByDevice)->sibling();  // needs none
    messages->barrier();
  });
}

TEST(C10dGroup, AnErrorInADestructorEndsNothing) {
  run_gloo_threads(2, [](int, testing::TorchGroup torch) {
    const auto [below, above] = faulty(std::move(torch), Faulty::AbortThrows);
    const auto group = make_c10d_group(nullptr, above, C10dPath::Native);
    {
      auto t = at::ones({8});
      const auto sibling = group->sibling();
      sibling->all_reduce(t, ReduceOp::Sum).wait();
      EXPECT_EQ(t.sum().item<float>(), 16);
    }
    group->barrier();
  });
}

TEST(C10dGroup, ASiblingIsForTheDeviceItWasMadeFor) {
  run_gloo_threads(2, [](int, testing::TorchGroup torch) {
    const auto group = make_c10d_group(nullptr, torch, C10dPath::ByDevice);
    const auto sibling = group->sibling();
    const auto text = message_of<UsageError>([&] { sibling->broadcast(at::empty({4}, at::kMeta), 0, "x"); });
    EXPECT_HAS(text,
               "broadcast (x, 16 B): this group is a sibling for tensors of cpu, not of meta; call sibling() with");
  });
}

// torch compares the calls of all ranks then; what carries them is split.
TEST(C10dGroup, SiblingsUnderTheChecksOfTorch) {
  run_gloo_threads(2, [](int rank, testing::TorchGroup torch) {
    using Group = c10d::ProcessGroup;
    const auto gloo = torch->getBackend(c10::DeviceType::CPU);
    const auto helper = c10::make_intrusive<Faulty>(torch, Faulty::CannotSplit, "helper");
    auto checked = c10::make_intrusive<Group>(torch->getStore(), rank, 2);
    checked->setBackend(c10::DeviceType::CPU, Group::BackendType::CUSTOM,
                        c10::make_intrusive<c10d::ProcessGroupWrapper>(gloo, helper));
    checked->setDefaultBackend(Group::BackendType::CUSTOM);
    checked->setGroupName("checked");
    auto t = at::full({8}, 1.0f + rank);
    make_c10d_group(nullptr, checked, C10dPath::Native)->sibling()->all_reduce(t, ReduceOp::Sum).wait();
    EXPECT_EQ(t.sum().item<float>(), 24);
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
             "[comm] no torch process group is registered under 'nobody'; make it first, in Python with "
             "torch.distributed.init_process_group() or new_group(), in C++ with c10d::register_process_group() (");
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

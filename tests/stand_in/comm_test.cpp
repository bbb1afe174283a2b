// Groups of torch on a host with an accelerator.
#include "tessera/comm/c10d/group.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <chrono>
#include <future>

#include "tests/comm/c10d/gloo_threads.h"
#include "tests/comm/collectives.h"
#include "tests/io/temp_folder.h"
#include "tests/stand_in/staged_backend.h"
#include "tests/support/saved.h"

namespace tessera::testing {
namespace {

c10::Device stand_in_of(int rank) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(rank)};
}

// run_gloo_threads() whose process group has a back end of its own for the device.
void run_staged_threads(int size, const std::function<void(int, TorchGroup)>& fn) {
  run_gloo_threads(size, [&](int rank, const TorchGroup& torch) {
    const auto gloo = torch->getBackend(c10::DeviceType::CPU);
    const auto store = c10::make_intrusive<c10d::PrefixStore>("staged", torch->getStore());
    stage(*torch, gloo->merge(store, gloo->getBackendOptions(), rank, size));
    fn(rank, torch);
  });
}

TEST(DeviceComm, CpuTensorsKeepSharedMemory) {
  // torch's "gloo" is for every accelerator, "cpu:gloo,cuda:nccl" has another back end for one.
  run_gloo_threads(2, [](int rank, const TorchGroup& torch) {
    torch->setBackend(c10::DeviceType::PrivateUse1, c10d::ProcessGroup::BackendType::GLOO,
                      torch->getBackend(c10::DeviceType::CPU));
    const auto group = comm::c10d_group(nullptr, *torch);
    EXPECT_EQ(group->name(), "shared memory");
    random_collectives(*group, 20, 24, 20011);
    EXPECT_TRUE(group->shared_memory(64).defined());
    const auto sibling = group->sibling();
    EXPECT_EQ(sibling->name(), "shared memory");
    random_collectives(*sibling, 20, 24, 20011);
    group->barrier();
  });
  run_staged_threads(2, [](int rank, const TorchGroup& torch) {
    const auto group = comm::c10d_group(nullptr, *torch);
    EXPECT_EQ(group->name(), "shared memory and staged");
    random_collectives(*group, 20, 24, 20011);
    for (const auto& of_device : {group, group->sibling(stand_in_of(rank))}) {
      at::Tensor there = at::full({1000}, 1.0f + rank, at::TensorOptions(stand_in_of(rank)));
      of_device->all_reduce(there, comm::ReduceOp::Sum).wait();
      EXPECT_TRUE(there.cpu().eq(3).all().item<bool>());
    }
    group->barrier();
  });
}

TEST(DeviceComm, SiblingsNeedNoCommonOrder) {
  run_staged_threads(2, [](int rank, const TorchGroup& torch) {
    const c10::Device device = stand_in_of(rank);
    const auto group = comm::c10d_group(nullptr, *torch);
    const auto one = group->sibling(device), other = group->sibling(device);
    for (const auto& [size_a, size_b] : std::vector<std::pair<int64_t, int64_t>>{{1000, 1000}, {1000, 70000}}) {
      at::Tensor a = at::full({size_a}, 1.0f + rank, at::TensorOptions(device));
      at::Tensor b = at::full({size_b}, 10.0f + rank, a.options());
      const auto call = [&](bool first) {
        return first ? one->all_reduce(a, comm::ReduceOp::Sum, "a") : other->all_reduce(b, comm::ReduceOp::Sum, "b");
      };
      comm::Pending first = call(rank == 0), second = call(rank == 1);
      first.wait();
      second.wait();
      EXPECT_TRUE(a.cpu().eq(3).all().item<bool>());
      EXPECT_TRUE(b.cpu().eq(21).all().item<bool>());
    }
    // One for another kind of tensors says so; a CPU tensor still has its way.
    const auto text = message_of<UsageError>([&] {
      group->sibling()->barrier();
      at::Tensor t = at::ones({4}, at::TensorOptions(device));
      comm::make_c10d_group(nullptr, torch, comm::C10dPath::ByDevice)->sibling()->all_reduce(t, comm::ReduceOp::Sum);
    });
    EXPECT_HAS(text, "this group is a sibling for tensors of cpu, not of privateuseone");
    at::Tensor here = at::ones({4});
    one->all_reduce(here, comm::ReduceOp::Sum).wait();
    EXPECT_EQ(here.sum().item<float>(), 8);
    group->barrier();
  });
}

// One rank releases collectives of a sibling and ends it. The other makes the calls later, or never.
TEST(DeviceComm, ASiblingEndsBeforeWhatItReleased) {
  using Clock = std::chrono::steady_clock;
  using Weak = c10::weak_intrusive_ptr<at::TensorImpl>;
  for (const std::string then : {"the calls come", "they do not", "the group is aborted"}) {
    std::promise<void> ended, over;
    std::vector<Weak> kept;
    run_staged_threads(2, [&](int rank, const TorchGroup& torch) {
      auto group = comm::c10d_group(nullptr, *torch);
      auto sibling = group->sibling(stand_in_of(rank));
      const auto sum = [&](float value) {
        at::Tensor t = at::full({50000}, value, at::TensorOptions(stand_in_of(rank)));
        return std::pair(t, sibling->all_reduce(t, comm::ReduceOp::Sum, "left"));
      };
      sum(1).second.wait();
      if (rank == 0) {
        auto began = Clock::now();
        for (int i = 0; i < 2; ++i) {
          auto [t, pending] = sum(10.0f + static_cast<float>(i));
          kept.emplace_back(t.getIntrusivePtr());
          pending.release();
        }
        sibling.reset();
        EXPECT_LT(Clock::now() - began, std::chrono::seconds(1)) << then;
        EXPECT_FALSE(kept[0].expired() || kept[1].expired()) << then;
        ended.set_value();
        over.get_future().wait();
        const bool aborts = then == "the group is aborted";
        if (aborts) group->abort("enough");
        began = Clock::now();
        group.reset();
        EXPECT_LT(Clock::now() - began, std::chrono::seconds(aborts ? 1 : 4)) << then;
      } else {
        ended.get_future().wait();
        for (int i = 0; i < 2 && then == "the calls come"; ++i) {
          auto [t, pending] = sum(100);
          pending.wait();
          EXPECT_TRUE(t.cpu().eq(110 + i).all().item<bool>());
        }
        over.set_value();
      }
    });
    EXPECT_STREQ(tessera_stand_in_races(), "") << then;
    EXPECT_TRUE(then != "the calls come" || (kept[0].expired() && kept[1].expired()));
  }
}

// Every stage with a save in the background beside each step, over collectives that meet in the order of calls.
TEST(DeviceComm, EnginesTrainAndSaveAtOnce) {
  for (const int stage : {0, 1, 2, 3}) {
    const io::TempFolder folder;
    const auto body = [&](int rank, const comm::GroupPtr& group, c10::Device device) {
      Toy toy;
      for (at::Tensor& t : toy.tensors)
        t = t.detach().to(device).requires_grad_(true);
      Engine engine = toy_engine({.stage = stage}, toy, group);
      for (int step = 0; step < 5; ++step) {
        if (!device.is_cpu())
          engine.checkpoints().save(folder.path(), {.tag = std::to_string(step), .asynchronous = true});
        toy_forward(engine, toy, toy_batch(rank, step).to(device)).backward();
        engine.step();
      }
      engine.checkpoints().wait();
      std::vector<at::Tensor> masters = values_of(engine).masters;
      for (at::Tensor& master : masters)
        master = master.cpu();
      return masters;
    };
    std::vector<at::Tensor> want;
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      const auto masters = body(rank, group, at::kCPU);
      if (rank == 0) want = masters;
    });
    run_staged_threads(2, [&](int rank, const TorchGroup& torch) {
      const auto masters = body(rank, comm::c10d_group(nullptr, *torch), stand_in_of(rank));
      expect_same(masters, want, at::kFloat, c10::str("stage ", stage));
    });
  }
}

}  // namespace
}  // namespace tessera::testing

// What Python's tests of the back end do not reach; tests/python/test_transport.py has every call in real processes.
#include "tessera/comm/torch_backend/backend.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <thread>

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::message_of;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

void run(int size, const std::function<void(int, const BackendPtr&)>& body) {
  std::vector<std::thread> ranks;
  for (auto& share : shm_thread_shares(size, 2min)) {
    ranks.emplace_back([&body, share]() mutable {
      const int rank = share->world->rank();
      body(rank, shm_backend(std::move(share)));
    });
  }
  for (auto& rank : ranks)
    rank.join();
}

// Calls of two kinds at once, launched by two threads of each rank: collectives keep their order, messages theirs.
TEST(ShmBackend, MessagesAndCollectivesInTwoThreads) {
  run(3, [](int rank, const BackendPtr& backend) {
    std::thread messages([&] {
      for (int i = 0; i < 100; ++i) {
        const int64_t n = i * 3001;
        std::vector<at::Tensor> out = {at::full({n}, rank, at::kFloat)}, in = {at::empty({n})};
        const auto sent = backend->send(out, (rank + 1) % 3, i % 4);
        backend->recv(in, (rank + 2) % 3, i % 4)->wait();
        sent->wait();
        EXPECT_TRUE(in[0].eq((rank + 2) % 3).all().item<bool>());
      }
    });
    for (int i = 0; i < 100; ++i) {
      std::vector<at::Tensor> t = {at::full({i * 2003}, rank, at::kFloat)};
      backend->allreduce(t)->wait();
      EXPECT_TRUE(t[0].eq(3).all().item<bool>());
    }
    messages.join();
  });
}

TEST(ShmBackend, HasItsNameOptionsAndNumbers) {
  run(1, [](int, const BackendPtr& backend) {
    EXPECT_EQ(backend->getBackendName(), "tessera");
    EXPECT_EQ(backend->getBackendOptions()->timeout, 2min);
    backend->setTimeout(5s);
    EXPECT_EQ(backend->getBackendOptions()->timeout, 5s);
    const auto before = backend->getSequenceNumberForGroup();
    backend->barrier()->wait();
    EXPECT_EQ(backend->getSequenceNumberForGroup(), before + 1);
  });
}

// A callback of the future is the same program on all ranks.
TEST(ShmBackend, AReductionToOneRankHasAResultOnAll) {
  run(2, [](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> tensors = {at::ones({3})};
    const auto work = backend->reduce(tensors, {});
    work->wait();
    ASSERT_EQ(work->result().size(), 1u);
    EXPECT_TRUE(work->result()[0].is_same(tensors[0]));
    EXPECT_TRUE(tensors[0].eq(rank == 0 ? 2 : 1).all().item<bool>());
  });
}

TEST(ShmBackend, CoalescedListsByRank) {
  run(2, [](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> in = {at::full({3}, rank, at::kFloat), at::full({5}, 10 + rank, at::kFloat)};
    std::vector<std::vector<at::Tensor>> out(2, {at::empty({3}), at::empty({5})});
    out[1] = {at::empty({3}), at::empty({5})};
    backend->allgather_coalesced(out, in)->wait();
    for (int r = 0; r < 2; ++r) {
      EXPECT_TRUE(out[r][0].eq(r).all().item<bool>());
      EXPECT_TRUE(out[r][1].eq(10 + r).all().item<bool>());
    }
    std::vector<at::Tensor> none;
    backend->allreduce_coalesced(none, {})->wait();
    backend->monitoredBarrier({});
  });
}

TEST(ShmBackend, RefusesWrongArgumentsWithoutHarm) {
  run(2, [](int rank, const BackendPtr& backend) {
    const auto text = [](const auto& call) { return message_of<c10::ValueError>(call); };
    std::vector<at::Tensor> two = {at::ones({1}), at::ones({1})}, one = {at::ones({1})};
    std::vector<at::Tensor> sparse = {at::ones({3, 3}).to_sparse()}, rows = {at::ones({3, 3}).to_sparse_csr()};
    std::vector<at::Tensor> meta = {at::empty({3}, at::TensorOptions(at::kMeta))};
    EXPECT_HAS(text([&] { backend->allreduce(two); }), "must be a list of one, got 2");
    EXPECT_HAS(text([&] { backend->broadcast(sparse); }), "takes dense tensors");
    EXPECT_HAS(text([&] { backend->allreduce(rows); }), "takes dense tensors");
    c10d::AllreduceOptions largest;
    largest.reduceOp = c10d::ReduceOp::MAX;
    EXPECT_HAS(text([&] { backend->allreduce(sparse, largest); }), "sparse tensors can only be added");
    EXPECT_HAS(text([&] { backend->allreduce(meta); }), "takes CPU tensors");
    EXPECT_HAS(text([&] { backend->send(one, 2, 0); }), "there is no rank 2 in a group of 2");
    c10d::BroadcastOptions options;
    options.rootRank = -1;
    EXPECT_HAS(text([&] { backend->broadcast(one, options); }), "there is no rank -1");
    std::vector<int64_t> splits = {1, 1}, wrong = {1, 3};
    at::Tensor a = at::ones({2}), b = at::ones({2}), c = at::ones({2}, at::kInt);
    EXPECT_HAS(text([&] { backend->alltoall_base(a, b, splits, wrong); }), "2 splits of 4 rows for 2 ranks and 2 rows");
    EXPECT_HAS(text([&] { backend->alltoall_base(a, c, splits, splits); }), "the output is Float and the input Int");
    c10d::AllreduceOptions scaled;
    scaled.reduceOp = {c10d::ReduceOp::PREMUL_SUM, c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(2.0)};
    EXPECT_HAS(text([&] { backend->allreduce(one, scaled); }), "PREMUL_SUM is not supported");
    one[0].fill_(rank);
    backend->allreduce(one)->wait();
    EXPECT_EQ(one[0].item<float>(), 1);
  });
}

// 0 is a time like others: only a negative one means that of the group.
TEST(ShmBackend, WaitsNoTimeWhereConfiguredSo) {
  run(2, [](int rank, const BackendPtr& backend) {
    if (rank == 1) return std::this_thread::sleep_for(500ms);
    c10d::BarrierOptions options;
    options.timeout = 0ms;
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { backend->monitoredBarrier(options); }),
               "timed out after 0.0 s waiting for rank(s) 1");
  });
}

// In ranks as threads a group of one stands for what tessera_backend() would make.
TEST(ShmBackend, SplitsAndMergesByMakingGroups) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const MakeBackend make = [&](const c10::intrusive_ptr<c10d::Store>& at, int rank, int size, auto timeout) {
    at->set("asked", std::to_string(rank) + " of " + std::to_string(size));
    return shm_backend(shm_thread_shares(1, timeout)[0]);
  };
  const auto backend = shm_backend(shm_thread_shares(2, 2min)[1], make);
  const auto options = backend->getBackendOptions();
  options->timeout = 7s;
  EXPECT_TRUE(backend->supportsSplitting());
  const auto part = backend->split(store, {0, 1}, options);
  EXPECT_EQ(store->get_to_str("asked"), "1 of 2");
  EXPECT_EQ(part->getBackendOptions()->timeout, 7s);
  EXPECT_FALSE(backend->split(store, {0}, options));
  backend->merge(store, options, 3, 4);
  EXPECT_EQ(store->get_to_str("asked"), "3 of 4");
  EXPECT_FALSE(part->supportsSplitting());
}

TEST(ShmBackend, AnAbortReachesTheOthers) {
  run(2, [](int rank, const BackendPtr& backend) {
    if (rank == 1) return backend->abort();
    EXPECT_HAS(message_of<c10::DistBackendError>([&] { backend->barrier()->wait(); }),
               "rank 1 aborted: the process group was aborted");
  });
}

}  // namespace
}  // namespace tessera::comm

#include "tessera/comm/torch_backend/work.h"

#include <thread>

#include "tessera/comm/torch_backend/messages.h"
#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::message_of;

struct Handles : ::testing::Test {
  explicit Handles(std::chrono::milliseconds timeout = 1min) : shares(shm_thread_shares(2, timeout)) {
    for (const auto& share : shares)
      progress_threads.push_back(std::make_shared<ProgressThread>(share->world, threads));
  }
  // A sum of `tensor` over both ranks.
  ShmWorkPtr launch(int rank, const at::Tensor& tensor, ShmWork::Result result = {}) {
    const auto op = shm_all_reduce(rank, 2, tensor, ReduceOp::Sum, "x");
    result.tensors.push_back(tensor);
    const std::vector<ShmWork::Call> calls = {{0, op}};
    auto work = c10::make_intrusive<ShmWork>(shares[rank], progress_threads[rank], calls, std::move(result),
                                             ShmWork::Label{"tessera:all_reduce", {tensor}}, std::nullopt,
                                             c10d::OpType::ALLREDUCE, 7);
    shares[rank]->world->launch(0, op);
    return work;
  }
  std::vector<ShmSharePtr> shares;
  const SideThreadsPtr threads = std::make_shared<SideThreads>();
  std::vector<std::shared_ptr<ProgressThread>> progress_threads;
};

const int64_t kLong = 3 * kSlots * kRecordBytes / 4;  // more than a ring holds

TEST_F(Handles, AreWaitedFor) {
  at::Tensor a = at::ones({kLong}), b = at::ones({kLong});
  const auto first = launch(0, a), second = launch(1, b);
  std::thread other([&] { second->wait(kNoTimeout); });
  EXPECT_TRUE(first->wait(kNoTimeout));
  other.join();
  EXPECT_TRUE(first->isCompleted() && first->isSuccess());
  EXPECT_TRUE(a.eq(2).all().item<bool>() && b.eq(2).all().item<bool>());
  EXPECT_EQ(first->getSequencenumber(), 7u);
  EXPECT_TRUE(first->result()[0].is_same(a));
}

TEST_F(Handles, FuturesCompleteWithoutAWait) {
  at::Tensor a = at::ones({kLong}), b = at::ones({kLong});
  const auto first = launch(0, a)->getFuture(), second = launch(1, b)->getFuture();
  second->wait();
  first->wait();
  EXPECT_TRUE(first->value().toTensorVector()[0].eq(2).all().item<bool>());
  const auto again = launch(0, a);
  progress_threads[1]->add(launch(1, b));
  again->wait(kNoTimeout);
  EXPECT_TRUE(again->getFuture()->completed());
}

// What Python's end needs: the threads let go of all handles, whether they were idle or waiting for a late rank.
TEST_F(Handles, MoveWithoutThreadsAfterTheirEnd) {
  at::Tensor a = at::ones({4}), b = at::ones({4}), late = at::ones({4});
  const auto first = launch(0, a)->getFuture(), second = launch(1, b)->getFuture();
  first->wait();
  const auto waiting = launch(0, late)->getFuture();
  EXPECT_TRUE(threads->stop(1min));
  EXPECT_EQ(late.use_count(), 3);  // here, in the result of the handle, in its operation
  EXPECT_FALSE(waiting->completed());
  launch(1, at::ones({4}));
  const auto rest = launch(0, a);
  std::thread other([&] { launch(1, b)->wait(kNoTimeout); });
  EXPECT_TRUE(rest->getFuture()->completed());
  other.join();
  EXPECT_TRUE(a.eq(4).all().item<bool>());
  progress_threads.clear();
  EXPECT_TRUE(waiting->completed());
}

// Callbacks run on the progress threads: what they wait for must move all the same, whether it is launched by them or was
// in flight before.
TEST_F(Handles, CallbacksMayWaitForFutures) {
  using Future = c10::ivalue::Future;
  std::vector<at::Tensor> tensors;
  std::vector<c10::intrusive_ptr<Future>> ends;
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 3; ++i)
      tensors.push_back(at::ones({kLong}));
    const auto second = tensors[3 * rank + 1], third = tensors[3 * rank + 2];
    const auto first = launch(rank, tensors[3 * rank])->getFuture();
    const auto before = launch(rank, second)->getFuture();
    const auto wait_for_both = [this, rank, before, third](Future&) {
      before->wait();
      launch(rank, third)->getFuture()->wait();
      return c10::IValue(rank);
    };
    ends.push_back(first->then(wait_for_both, c10::IntType::get()));
  }
  for (int i = 0; i < 3000 && !(ends[0]->completed() && ends[1]->completed()); ++i)
    std::this_thread::sleep_for(10ms);
  ASSERT_TRUE(ends[0]->completed() && ends[1]->completed());
  for (const at::Tensor& t : tensors)
    EXPECT_TRUE(t.eq(2).all().item<bool>());
}

// The oldest handle never ends; those behind it must.
TEST_F(Handles, FuturesDoNotWaitForOlderOnes) {
  const auto message = shm_receive(at::zeros({1}), 1, 5);
  ShmWorld& world = *shares[0]->world;
  const auto messages = std::make_shared<ShmMessages>(world.segment(), 0, 0, 2);
  const int channel = world.attach(messages);
  world.launch(channel, *message, [&] { messages->receive(message); });
  const std::vector<ShmWork::Call> calls = {{channel, message}};
  const auto never =
      c10::make_intrusive<ShmWork>(shares[0], progress_threads[0], calls, ShmWork::Result{},
                                   ShmWork::Label{"tessera:recv", {}}, std::nullopt, c10d::OpType::RECV, 1);
  const auto last = never->getFuture();
  at::Tensor a = at::ones({kLong}), b = at::ones({kLong});
  const auto future = launch(0, a)->getFuture();
  launch(1, b)->wait(kNoTimeout);
  future->wait();
  EXPECT_FALSE(last->completed());
  std::thread waiting([&] { EXPECT_ANY_THROW(never->wait(kNoTimeout)); });
  progress_threads[0].reset();
  waiting.join();
  last->wait();
  EXPECT_TRUE(last->hasError());
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { never->wait(kNoTimeout); }), "its process group was destroyed");
}

TEST_F(Handles, MayBePolledAndDropped) {
  at::Tensor a = at::ones({kLong}), b = at::ones({kLong});
  const auto work = launch(0, a);
  EXPECT_FALSE(work->isCompleted());
  progress_threads[1]->add(launch(1, b));  // nobody holds it but the progress thread
  while (!work->isCompleted())
    std::this_thread::yield();
  EXPECT_TRUE(a.eq(2).all().item<bool>());
}

TEST_F(Handles, PutResultsWhereTheyBelong) {
  const at::Tensor grid = at::zeros({30, 20}).t(), packed = at::ones({20, 30}), b = at::ones({20, 30});
  at::Tensor after;
  const auto finish = [&] { after = grid.clone(); };
  const auto work = launch(0, packed, {.tensors = {}, .copies = {{grid, packed}}, .finish = finish});
  launch(1, b)->wait(kNoTimeout);
  work->wait(kNoTimeout);
  work->wait(kNoTimeout);
  EXPECT_TRUE(grid.eq(2).all().item<bool>());
  EXPECT_TRUE(after.eq(2).all().item<bool>());
}

TEST_F(Handles, AFailureReachesWaitsPollsAndFutures) {
  at::Tensor a = at::ones({4});
  const auto waited = launch(0, a), polled = launch(0, a), promised = launch(0, a);
  const auto future = promised->getFuture();
  shares[1]->world->abort("no more");
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { waited->wait(kNoTimeout); }), "rank 1 aborted: no more");
  EXPECT_TRUE(polled->isCompleted());
  EXPECT_FALSE(polled->isSuccess());
  EXPECT_TRUE(polled->exception() != nullptr);
  EXPECT_ANY_THROW(future->waitAndThrow());
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { launch(0, a); }), "no more");
  EXPECT_THROW(waited->sourceRank(), c10::Error);
}

struct HurriedHandles : Handles {
  HurriedHandles() : Handles(300ms) {}
};

TEST_F(HurriedHandles, HaveATimeoutWhoeverWaits) {
  at::Tensor a = at::ones({4});
  EXPECT_ANY_THROW(launch(0, a)->getFuture()->waitAndThrow());
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { launch(0, a); }), "timed out after 0.3 s waiting for rank(s) 1");
}

TEST_F(Handles, AWaitMayHaveATimeoutOfItsOwn) {
  at::Tensor a = at::ones({4});
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { launch(0, a)->wait(200ms); }), "timed out after 0.2 s");
}

}  // namespace
}  // namespace tessera::comm

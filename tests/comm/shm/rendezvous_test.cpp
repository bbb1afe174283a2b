#include "tessera/comm/shm/rendezvous.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <thread>

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::message_of;

// The last rank is one whose process is not seen, or that brings its own segment.
struct ShmRendezvous : ::testing::Test {
  std::vector<ShmSharePtr> rendezvous(int size) {
    std::vector<ShmSharePtr> shares(size);
    std::vector<std::thread> ranks;
    for (int r = 0; r < size; ++r)
      ranks.emplace_back([&, r] { shares[r] = shm_rendezvous(store, r, size, 1min); });
    for (auto& rank : ranks)
      rank.join();
    return shares;
  }
  const c10::intrusive_ptr<c10d::Store> held = c10::make_intrusive<c10d::HashStore>();
  c10d::Store& store = *held;
};

TEST_F(ShmRendezvous, GivesAllRanksOneWorld) {
  const auto shares = rendezvous(3);
  shares[2]->world->abort("seen by all");
  for (const auto& share : shares) {
    EXPECT_EQ(share->channel, 0);
    EXPECT_HAS(
        message_of<c10::DistBackendError>([&] { share->world->launch(0, shm_barrier(share->world->rank(), 3, "x")); }),
        "rank 2 aborted: seen by all");
  }
}

TEST_F(ShmRendezvous, FailsOnAllRanksWhenOneCannotShare) {
  store.set("tessera/shm/segment", std::string("1 999 5"));  // of a process that has none
  std::string said;
  std::thread other([&] {
    store.set("tessera/shm/joined_0", std::string("ok"));
    store.set("tessera/shm/joined_1", std::string("it has no hands"));
    said = message_of<c10::DistBackendError>([&] { shm_rendezvous(store, 2, 3, 1min); });
  });
  other.join();
  EXPECT_HAS(said, "[comm] rank 1 of 3 cannot share memory: it has no hands");
}

TEST_F(ShmRendezvous, NeverJoinsAnotherSegmentThanThatOfRank0) {
  const auto stale = ShmSegment::create(ShmLayout{2}.total());
  stale->reserve(0, ShmLayout{2}.control());
  reinterpret_cast<ShmHeader*>(stale->data())->secret = 17;
  store.set("tessera/shm/segment", std::to_string(getpid()) + " " + std::to_string(stale->fd()) + " 18");
  store.set("tessera/shm/joined_0", std::string("ok"));
  EXPECT_HAS(message_of<c10::DistBackendError>([&] { shm_rendezvous(store, 1, 2, 1min); }),
             "rank 1 of 2 cannot share memory: shared memory: process ");
}

TEST(ShmShare, LeavesWithItsLastHolder) {
  auto shares = shm_thread_shares(2, 1min);
  const auto op = shm_barrier(0, 2, "x");
  shares[0]->world->launch(0, op);
  const auto copy = shares[1];
  const auto& world = *shares[0]->world;
  EXPECT_EQ(world.size(), 2);
  shares[1].reset();
  std::thread other([copy] { copy->world->launch(0, shm_barrier(1, 2, "x")); });
  other.join();
  shares[0]->world->wait(0, *op, {});
  EXPECT_TRUE(op->done);
  EXPECT_THROW(shm_thread_shares(0, 1min), c10::ValueError);
}

}  // namespace
}  // namespace tessera::comm

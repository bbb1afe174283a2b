#include "tessera/comm/c10d/point_to_point.h"

#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

// Ranks that are threads and meet at a store as often as they like, in either way.
TEST(PointToPoint, RanksConnectAtAStore) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  for (const bool shares : {true, false, true}) {
    for (const int64_t size : {3, 1'000'000}) {
      const at::Tensor x = at::randn({size});
      std::vector<std::thread> threads;
      for (int rank = 0; rank < 3; ++rank)
        threads.emplace_back([&, rank] {
          const auto p2p = store_point_to_point(store, rank, 3, std::chrono::seconds(30), shares);
          EXPECT_EQ(p2p->rank(), rank);
          EXPECT_EQ(p2p->size(), 3);
          p2p->send(p2p->share(x * rank), (rank + 1) % 3, 5, "a ring");
          const int from = (rank + 2) % 3;
          EXPECT_TRUE(at::equal(p2p->take({size}, at::kFloat, from, 5, "a ring"), x * from));
          p2p->flush();
        });
      for (auto& thread : threads)
        thread.join();
    }
  }
}

}  // namespace
}  // namespace tessera::comm

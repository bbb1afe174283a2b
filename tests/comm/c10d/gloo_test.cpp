#include "tessera/comm/c10d/gloo.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <thread>

namespace tessera::comm {
namespace {

// Two ranks as threads meet and add.
void add_over_gloo(bool loopback) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      const auto backend = gloo_backend(store, r, 2, std::chrono::seconds(60), loopback);
      EXPECT_EQ(backend->getBackendName(), "gloo");
      std::vector<at::Tensor> tensors = {at::full({3}, r + 1)};
      backend->allreduce(tensors)->wait();
      EXPECT_TRUE(tensors[0].eq(3).all().item<bool>());
    });
  }
  for (auto& rank : ranks)
    rank.join();
}

TEST(GlooBackend, ConnectsOnTheLoopback) {
  add_over_gloo(true);
}

TEST(GlooBackend, ConnectsOnTheInterfaceOfTheEnvironment) {
  setenv("GLOO_SOCKET_IFNAME", "lo", 1);
  add_over_gloo(false);
  setenv("GLOO_SOCKET_IFNAME", "no_such_interface", 1);
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_ANY_THROW(gloo_backend(store, 0, 2, std::chrono::seconds(1), true));
  unsetenv("GLOO_SOCKET_IFNAME");
}

}  // namespace
}  // namespace tessera::comm

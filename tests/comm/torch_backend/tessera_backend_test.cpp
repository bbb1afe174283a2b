#include "tessera/comm/torch_backend/tessera_backend.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

// One store for all of them, as one that outlives a process group.
TEST(TesseraBackend, IsSharedMemoryOrGloo) {
  setenv("GLOO_SOCKET_IFNAME", "lo", 1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const auto& [transport, name] : std::vector<std::pair<std::string, std::string>>{
           {"auto", "tessera"}, {"gloo", "gloo"}, {"shared_memory", "tessera"}}) {
    setenv("TESSERA_TRANSPORT", transport.c_str(), 1);
    std::vector<c10::intrusive_ptr<c10d::Backend>> made(2);  // released once both are there
    std::vector<std::thread> ranks;
    for (int r = 0; r < 2; ++r)
      ranks.emplace_back([&, r] { made[r] = tessera_backend(store, r, 2, 1min); });
    for (auto& rank : ranks)
      rank.join();
    for (const auto& backend : made)
      EXPECT_EQ(backend->getBackendName(), name);
  }
  unsetenv("TESSERA_TRANSPORT");
  unsetenv("GLOO_SOCKET_IFNAME");
}

}  // namespace
}  // namespace tessera::comm

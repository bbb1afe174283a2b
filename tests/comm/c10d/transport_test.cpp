// The choice itself; environment_group_test and tests/python/test_transport.py have it in real processes, and
// torch_backend/tessera_backend_test what of it torch.distributed gets.
#include "tessera/comm/c10d/transport.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "tessera/comm/backends.h"
#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::message_of;

// What each of two ranks (threads of this process, so they share a host) gets; single_group() stands for the back end at
// hand. `store`: with what somebody has said there.
std::vector<std::string> names(const std::string& transport, const c10::intrusive_ptr<c10d::Store>& store) {
  setenv("TESSERA_TRANSPORT", transport.c_str(), 1);
  std::vector<std::string> names(2);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      try {
        names[r] = choose_transport(store, r, 2, 1min, [] { return single_group(); })->name();
      } catch (const c10::Error& error) {
        names[r] = error.what_without_backtrace();
      }
    });
  }
  for (auto& rank : ranks)
    rank.join();
  unsetenv("TESSERA_TRANSPORT");
  return names;
}

c10::intrusive_ptr<c10d::Store> fresh() {
  return c10::make_intrusive<c10d::HashStore>();
}

TEST(Transport, IsWhatTheEnvironmentSays) {
  EXPECT_EQ(names("auto", fresh()), std::vector<std::string>(2, "shared memory"));
  EXPECT_EQ(names("shared_memory", fresh()), std::vector<std::string>(2, "shared memory"));
  EXPECT_EQ(names("gloo", fresh()), std::vector<std::string>(2, "single"));
  EXPECT_HAS(names("carrier", fresh())[0], "TESSERA_TRANSPORT is 'carrier'; it may be auto, gloo or shared_memory");
}

// Its process may host the store, and end with what it has heard.
TEST(Transport, RankZeroReturnsWhenAllHaveHeard) {
  static std::atomic<bool> heard;
  struct Slow : c10d::PrefixStore {
    using PrefixStore::PrefixStore;
    std::vector<uint8_t> get(const std::string& key) override {
      std::this_thread::sleep_for(100ms);
      auto value = PrefixStore::get(key);
      if (std::string(value.begin(), value.end()).find("from 0") != std::string::npos) heard = true;
      return value;
    }
  };
  heard = false;
  const auto store = fresh();
  const std::vector<std::string> both{"from 0", "from 1"};
  std::thread other(
      [&] { EXPECT_EQ(exchange_all(c10::make_intrusive<Slow>("s", store), 1, 2, "topic", "from 1"), both); });
  EXPECT_EQ(exchange_all(c10::make_intrusive<c10d::PrefixStore>("s", store), 0, 2, "topic", "from 0"), both);
  EXPECT_TRUE(heard);
  other.join();
}

TEST(Transport, StaysWithTheBackEndAtHandWhenMemoryCannotBeShared) {
  // A rank that fails to join says so; here it is the store that says it in its name.
  struct Spoilt : c10d::HashStore {
    void set(const std::string& key, const std::vector<uint8_t>& data) override {
      const std::string text = "no memory";
      HashStore::set(key, key == "tessera/shm/joined_1" ? std::vector<uint8_t>(text.begin(), text.end()) : data);
    }
  };
  EXPECT_EQ(names("auto", c10::make_intrusive<Spoilt>()), std::vector<std::string>(2, "single"));
  for (const auto& text : names("shared_memory", c10::make_intrusive<Spoilt>()))
    EXPECT_HAS(text, "[comm] rank 1 of 2 cannot share memory: no memory");
}

}  // namespace
}  // namespace tessera::comm

#include "tessera/offload/staging.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera::offload {

TEST(Staging, KeepsSoManyBuffersAndNoMore) {
  const auto staging = std::make_shared<Staging>(2, 8192);
  std::vector<std::shared_ptr<char>> taken;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(staging->has_room(10), i < 2);
    taken.push_back(staging->take(10));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(taken.back().get()) % io::kDirectAlignment, 0u);
  }
  EXPECT_TRUE(staging->has_room(8193)) << "none is large enough: waiting for one would be in vain";
  EXPECT_EQ(staging->peak_bytes(), 2 * 8192 + 10);
  staging->keep(1);
  EXPECT_FALSE(staging->has_room(10)) << "fewer are not asked for";
  taken.clear();
  EXPECT_TRUE(staging->has_room(8192));
  taken.push_back(staging->take(8192));
  taken.push_back(staging->take(1));
  taken.push_back(staging->take(100'000));
  EXPECT_EQ(staging->peak_bytes(), 2 * 8192 + 100'000);
  staging->keep(3);
  EXPECT_TRUE(staging->has_room(8192));
}

TEST(Staging, KnowsWhatIsItsOwn) {
  const auto staging = std::make_shared<Staging>(1, 8192);
  std::shared_ptr<char> block = staging->take(100);
  const char* const memory = block.get();
  EXPECT_TRUE(staging->holds(memory, 8192));
  EXPECT_TRUE(staging->holds(memory + 8000, 192));
  EXPECT_FALSE(staging->holds(memory + 8000, 193));
  char other = 0;
  EXPECT_FALSE(staging->holds(&other, 1));
  block.reset();
  EXPECT_FALSE(staging->holds(memory, 1));
}

TEST(Staging, ItsMemoryMayOutliveIt) {
  int freed = 0;
  const auto counted = [&](int64_t bytes) {
    return std::shared_ptr<char>(new char[static_cast<size_t>(bytes)], [&](const char* memory) {
      ++freed;
      delete[] memory;
    });
  };
  auto staging = std::make_shared<Staging>(1, 8192, counted);
  std::shared_ptr<char> block = staging->take(100);
  staging.reset();
  block.get()[99] = 1;
  EXPECT_EQ(freed, 0);
  block.reset();
  EXPECT_EQ(freed, 1);
}

}  // namespace tessera::offload

#include "tessera/comm/copy_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace tessera::comm {
namespace {

constexpr int64_t kRoom = 128;  // bytes around what is copied

using Copy = void (*)(char* to, const char* from, int64_t bytes);

// Whether `bytes` bytes arrive and nothing beside them changes, from and to any place in a cache line.
void expect_copies(Copy copy, int64_t bytes, int64_t to, int64_t from) {
  std::vector<char> source(bytes + 2 * kRoom);
  std::iota(source.begin(), source.end(), static_cast<char>(bytes));
  std::vector<char> result(bytes + 2 * kRoom, 'x'), expected = result;
  std::copy_n(source.begin() + from, bytes, expected.begin() + to);
  copy(result.data() + to, source.data() + from, bytes);
  EXPECT_EQ(result, expected) << bytes << " bytes from " << from << " to " << to;
}

TEST(CopyBytes, CopiesAnyNumberOfBytesFromAnyPlaceToAny) {
  for (const Copy copy : {copy_bytes, copy_ahead, copy_past_caches}) {
    for (const int64_t bytes : {0, 1, 15, 16, 63, 64, 65, 127, 128, 191, 1000, 70000}) {
      for (const int64_t to : {0, 1, 16, 63, 64, 65}) {
        for (const int64_t from : {0, 3, 16, 64})
          expect_copies(copy, bytes, to, from);
      }
    }
  }
}

TEST(CopyBytes, TakesResultsOfEverySize) {
  for (const int64_t total : {int64_t{0}, int64_t{1000}, int64_t{1} << 40}) {
    std::vector<char> source(1000, 'a'), result(1000, 'b');
    copy_result(result.data(), source.data(), 1000, total);
    EXPECT_EQ(result, source) << total;
    std::vector<char> ring(1000, 'b');
    copy_to_ring(ring.data(), source.data(), 1000, total);
    EXPECT_EQ(ring, source) << total;
  }
}

}  // namespace
}  // namespace tessera::comm

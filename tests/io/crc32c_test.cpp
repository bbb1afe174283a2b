#include "tessera/io/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace tessera::io {
namespace {

TEST(Crc32c, KnownValues) {
  // RFC 3720, B.4.
  EXPECT_EQ(crc32c_reference("123456789", 9), 0xe3069283u);
  const std::string zeros(32, '\0'), ones(32, '\xff');
  EXPECT_EQ(crc32c(zeros.data(), 32), 0x8a9136aau);
  EXPECT_EQ(crc32c(ones.data(), 32), 0x62a8ab43u);
  EXPECT_EQ(crc32c("", 0), 0u);
  // RFC 1952's, as every zip tool computes it.
  EXPECT_EQ(crc32_reference("123456789", 9), 0xcbf43926u);
}

using Checksum = uint32_t (*)(const void*, int64_t, uint32_t);
class Checksums : public testing::TestWithParam<std::pair<Checksum, Checksum>> {};
INSTANTIATE_TEST_SUITE_P(All, Checksums,
                         testing::Values(std::pair(&crc32c, &crc32c_reference), std::pair(&crc32, &crc32_reference)));

TEST_P(Checksums, EveryLengthAndStartAndCutLikeTheReference) {
  const auto [fast, reference] = GetParam();
  std::vector<uint8_t> bytes(300);
  std::mt19937 random(7);
  for (uint8_t& byte : bytes)
    byte = static_cast<uint8_t>(random());
  for (int64_t start = 0; start < 9; ++start)
    for (int64_t length = 0; length < 200; ++length) {
      const uint32_t expected = reference(bytes.data() + start, length, 0);
      ASSERT_EQ(fast(bytes.data() + start, length, 0), expected);
      const int64_t first = length / 3;
      const uint32_t before = fast(bytes.data() + start, first, 0);
      ASSERT_EQ(fast(bytes.data() + start + first, length - first, before), expected);
    }
}

}  // namespace
}  // namespace tessera::io

#include "tessera/io/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace tessera::io {

namespace {

constexpr uint32_t kCastagnoli = 0x82f63b78, kZip = 0xedb88320;  // reflected

using Table = std::array<std::array<uint32_t, 256>, 8>;

// Row k: what a byte adds to the checksum k bytes later.
constexpr Table make_table(uint32_t polynomial) {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
    table[0][byte] = crc;
  }
  for (size_t k = 1; k < table.size(); ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xff];
  return table;
}
constexpr Table kTable = make_table(kCastagnoli), kZipTable = make_table(kZip);

// Takes eight bytes at a time, little-endian.
uint32_t by_table(const Table& table, const uint8_t* p, int64_t n, uint32_t crc) {
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k)
      crc ^= table[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; n > 0; ++p, --n)
    crc = (crc >> 8) ^ table[0][(crc ^ *p) & 0xff];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* p, int64_t n, uint32_t crc) {
  uint64_t wide = crc;
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, p, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; n > 0; ++p, --n)
    narrow = _mm_crc32_u8(narrow, *p);
  return narrow;
}
#endif

uint32_t by_bit(uint32_t polynomial, const uint8_t* p, int64_t n, uint32_t crc) {
  for (int64_t i = 0; i < n; ++i) {
    crc ^= p[i];
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
  }
  return crc;
}

}  // namespace

uint32_t crc32c(const void* data, int64_t bytes, uint32_t before) {
  const auto* p = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(p, bytes, ~before);
#endif
  return ~by_table(kTable, p, bytes, ~before);
}

uint32_t crc32c_reference(const void* data, int64_t bytes, uint32_t before) {
  return ~by_bit(kCastagnoli, static_cast<const uint8_t*>(data), bytes, ~before);
}

uint32_t crc32(const void* data, int64_t bytes, uint32_t before) {
  return ~by_table(kZipTable, static_cast<const uint8_t*>(data), bytes, ~before);
}

uint32_t crc32_reference(const void* data, int64_t bytes, uint32_t before) {
  return ~by_bit(kZip, static_cast<const uint8_t*>(data), bytes, ~before);
}

}  // namespace tessera::io

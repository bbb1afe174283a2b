// CRC-32C (Castagnoli, RFC 3720 appendix B.4) and CRC-32 (of zip archives, RFC 1952 section 8) of bytes.
#pragma once

#include <cstdint>

namespace tessera::io {

// CRC-32C of `bytes` bytes that follow others whose checksum was `before`; 0 where none did. Uses SSE 4.2 where there is one.
uint32_t crc32c(const void* data, int64_t bytes, uint32_t before = 0);
// The same checksum by the definition, byte by byte.
uint32_t crc32c_reference(const void* data, int64_t bytes, uint32_t before = 0);
// CRC-32, by table.
uint32_t crc32(const void* data, int64_t bytes, uint32_t before = 0);
uint32_t crc32_reference(const void* data, int64_t bytes, uint32_t before = 0);

}  // namespace tessera::io

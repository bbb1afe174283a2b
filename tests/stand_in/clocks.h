// The race detector of the stand-in accelerator: who reads and writes which bytes, and what orders the two.
//
// Note [Races]
//   Work is done when the call returns, so a missing wait has no effect here. It is found by what orders the streams:
//   - A stream has a clock: for every stream, how much of its work comes before what this one is given next. An event is
//     a copy of its stream's clock; who waits for it takes the later entry of each. What the host has waited for comes
//     before all that is given to any stream after that. The host is one, whatever its threads: how they hand over to each
//     other is not seen here, and what is over is over for all of them.
//   - Of every byte the last write is remembered and the reads since. A use of bytes whose last write is not before it,
//     or a write of bytes with a read that is not, is a finding. It names both, whichever of them ran first.
//   - Memory that is given out is written by the stream that asked for it. Released memory goes back to that stream, as
//     CUDA's allocator does it, and is free at once for what the stream is given later. So when that stream asks again,
//     for any number of bytes, uses by other streams must be before that. record_stream() excepts a stream.
//   - What the host does with page-locked memory is not seen. Copies that do not block are done as late as can be
//     instead; see late_copies.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/stand_in/memory.h"

namespace tessera::stand_in {

constexpr int kStreams = 64;  // of a device: its default stream, 0, and those of a pool that comes round
using Stream = int;           // device * kStreams + number
using Clock = std::array<uint64_t, size_t{kDevices} * kStreams>;

struct Bytes {
  uintptr_t begin = 0, end = 0;
};
// Addresses as they are in host memory.
struct Use {
  Bytes bytes;
  bool writes;
  const char* part;  // an argument's name, "grad"; it and the name of work live as long as the process
};

inline Bytes bytes_at(const void* p, size_t count) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(p) & kAddress;
  return {begin, begin + count};
}

// A stream's handle for kernels. Not an address.
inline void* stream_handle(Stream stream) {
  return reinterpret_cast<void*>(uintptr_t{0x7e55e2a0} + static_cast<uintptr_t>(stream));
}
// -1: a handle of no stream.
inline Stream stream_of_handle(const void* handle) {
  const uintptr_t stream = reinterpret_cast<uintptr_t>(handle) - 0x7e55e2a0;
  return stream < uintptr_t{kDevices} * kStreams ? static_cast<Stream>(stream) : -1;
}
Stream current_stream(int device);  // of the calling thread

// A stream is given work, which uses these bytes; its number on the stream.
uint64_t give(Stream stream, const char* work, const std::vector<Use>& uses);
Clock clock_of(Stream stream);                   // what an event takes
void order(Stream stream, const Clock& before);  // the stream waits for an event
void host_waits_for(const Clock& before);        // and does the late copies of it
inline void host_waits_for(Stream stream) {
  host_waits_for(clock_of(stream));
}

void lend(Bytes bytes, Stream stream);
// Memory that `stream` released and asks for others now; all uses are before that, but those of the streams in `except`.
void check_released(Bytes bytes, Stream stream, const std::vector<Stream>& except);
void forget(Bytes bytes);  // goes back to the system

void found(std::string finding);
void check_works();  // throws where tests want the devices to fail
void notice_wait();  // the host waits: tessera_stand_in_on_wait()
std::string name_of(Stream stream);

}  // namespace tessera::stand_in

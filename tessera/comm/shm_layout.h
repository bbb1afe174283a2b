// What lies where in a segment: a header, a block for each rank, counters and a ring of slots for each channel and rank.
// A channel is the calls of one Group; siblings have channels of their own, so that none waits behind another's data.
// Everything is zero at first.
#pragma once

#include <atomic>
#include <cstdint>

#include "tessera/comm/shm_op.h"
#include "tessera/comm/shm_signal.h"

namespace tessera::comm {

inline constexpr int64_t kChannels = 64;  // address space only, but for the first and those of siblings
inline constexpr int64_t kSlots = 32;     // records that a rank may be ahead of the slowest reader
inline constexpr int64_t kPage = 4096;

struct ShmHeader {
  uint64_t nonce;                     // the creator's, so that nobody takes another segment for this one
  std::atomic<uint32_t> cause_state;  // 0: all is well, 1: somebody is writing the cause, 2: it is there
  char cause[kPage - 16];
};
static_assert(sizeof(ShmHeader) == kPage);

struct alignas(128) ShmRank {
  std::atomic<int> pid;
  std::atomic<uint64_t> start;  // start_of_process()
  Bell bell;
};

struct alignas(128) ShmCounters {
  std::atomic<int64_t> written;               // records that this rank has published
  alignas(64) std::atomic<int64_t> consumed;  // steps of which it has read everybody's record
  std::atomic<uint32_t> left;                 // 1: its Group and all its handles are gone
};

// Head of a record. The call is described in its first record only.
struct SlotHead {
  uint64_t hash;  // agreement_hash() of the call
  int64_t bytes;
  int32_t dtype, op, root;
  char name[20];
  char label[208];  // cut off where longer
};
static_assert(sizeof(SlotHead) == 256);

inline constexpr int64_t kSlotBytes = static_cast<int64_t>(sizeof(SlotHead)) + kRecordBytes;
inline constexpr int64_t kRingBytes = kSlots * kSlotBytes;
static_assert(kRingBytes % kPage == 0);

// Offsets of the parts for `size` ranks.
struct ShmLayout {
  int64_t size;

  int64_t ranks() const { return sizeof(ShmHeader); }
  int64_t counters() const { return ranks() + size * static_cast<int64_t>(sizeof(ShmRank)); }
  int64_t control() const {
    const int64_t end = counters() + kChannels * size * static_cast<int64_t>(sizeof(ShmCounters));
    return (end + kPage - 1) / kPage * kPage;
  }
  int64_t ring(int64_t channel, int64_t rank) const { return control() + (channel * size + rank) * kRingBytes; }
  int64_t total() const { return ring(kChannels, 0); }
};

}  // namespace tessera::comm

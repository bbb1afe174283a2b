// What lies where in a segment: a header, a block for each rank, counters and a ring of slots for each channel and rank,
// and a ring for the messages from each rank to each other one.
// A channel is the calls of one Group; siblings have channels of their own, so that none waits behind another's data.
// Everything is zero at first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tessera/comm/shm/op.h"
#include "tessera/comm/shm/signal.h"

namespace tessera::comm {

inline constexpr int64_t kChannels = 512;    // address space only, but for the first and those of siblings
inline constexpr int64_t kSlots = 32;        // records that a rank may be ahead of the slowest reader
inline constexpr int64_t kMessageSlots = 8;  // kSlots for messages between two ranks
inline constexpr int64_t kPage = 4096;

struct ShmHeader {
  int64_t secret;                     // first, where ShmSegment::offer() puts it
  std::atomic<uint32_t> cause_state;  // 0: all is well, 1: somebody is writing the cause, 2: it is there
  char cause[kPage - 16];
};
static_assert(sizeof(ShmHeader) == kPage && offsetof(ShmHeader, secret) == 0);

// What a rank is blocked in, for the others to see: Note [Wait cycles] in wait_cycle.h. It belongs to the first of
// a rank's threads that has waited for long.
struct ShmBlocked {
  std::atomic<uint64_t> version;                // odd: what follows holds
  std::atomic<int64_t> channel, number, place;  // the call, and where the ring has its first record
  std::atomic<uint64_t> held[kChannels / 64];   // bits: channels that only the blocked thread uses
};

struct alignas(128) ShmRank {
  std::atomic<int> pid;
  std::atomic<uint64_t> start;  // start_of_process() of hosts/hosts.h
  std::atomic<int> core;        // one more than the core on which the rank last waited; 0: it has not
  Doorbell doorbell;
  ShmBlocked blocked;
};

struct alignas(128) ShmCounters {
  std::atomic<int64_t> written;               // records that this rank has published
  alignas(64) std::atomic<int64_t> consumed;  // steps of which the rank has read everybody's record
  std::atomic<int64_t> launched;              // calls that the rank has made
  std::atomic<uint32_t> left;                 // 1: the rank's Group and all its handles are gone
};

// Counters of the messages from one rank to another.
struct alignas(128) MessageCounters {
  std::atomic<int64_t> written;               // records, by the sender
  alignas(64) std::atomic<int64_t> consumed;  // by the receiver
};

// Head of a record. The call is described in its first record only.
struct SlotHead {
  uint64_t hash;  // agreement_hash() of the call; the tag of a message
  int64_t bytes;
  int32_t dtype, op, root;
  char name[20];
  char label[208];  // cut off where longer
};
static_assert(sizeof(SlotHead) == 256);

template <size_t N>
void put_text(char (&to)[N], std::string_view text) {
  const size_t length = std::min(text.size(), N - 1);
  text.copy(to, length);
  to[length] = '\0';
}

inline constexpr int64_t kSlotBytes = static_cast<int64_t>(sizeof(SlotHead)) + kRecordBytes;
inline constexpr int64_t kRingBytes = kSlots * kSlotBytes;
inline constexpr int64_t kMessageRingBytes =
    kMessageSlots * kSlotBytes + (kPage - kMessageSlots * kSlotBytes % kPage) % kPage;
static_assert(kRingBytes % kPage == 0 && kMessageRingBytes % kPage == 0);

// Offsets of the parts for `size` ranks.
struct ShmLayout {
  int64_t size;

  int64_t ranks() const { return sizeof(ShmHeader); }
  int64_t counters() const { return ranks() + size * static_cast<int64_t>(sizeof(ShmRank)); }
  // The parts before this one have memory from the start.
  int64_t control() const {
    const int64_t end = message_counters() + size * size * static_cast<int64_t>(sizeof(MessageCounters));
    return (end + kPage - 1) / kPage * kPage;
  }
  int64_t message_counters() const { return counters() + kChannels * size * static_cast<int64_t>(sizeof(ShmCounters)); }
  int64_t ring(int64_t channel, int64_t rank) const { return control() + (channel * size + rank) * kRingBytes; }
  int64_t message_ring(int64_t from, int64_t to) const {
    return ring(kChannels, 0) + (from * size + to) * kMessageRingBytes;
  }
  int64_t total() const { return message_ring(size, 0); }
};

}  // namespace tessera::comm

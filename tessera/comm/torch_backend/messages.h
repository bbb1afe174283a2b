// ShmMessages: messages from one rank to another over shared memory, by tag.
//
// Note [Messages]
//   From each rank to each other one leads a ring of its own, so messages need no order among collectives or other pairs.
//   Messages of one tag between two ranks arrive in the order in which they were sent. When the one at the front of a ring
//   is not what a receiver waits for, it is put aside into memory of the receiver, so that those behind it can come; one
//   that nobody waits behind stays in the ring, and its sender waits.
#pragma once

#include <deque>
#include <list>
#include <string>
#include <vector>

#include "tessera/comm/shm/endpoint.h"
#include "tessera/comm/shm/layout.h"
#include "tessera/comm/shm/op.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm {

// A message in flight.
class ShmMessage final : public ShmCall {
 public:
  // `peer`: the other rank; a receiver may have -1, any. The tensor is contiguous, on the CPU, and kept alive.
  ShmMessage(const char* name, const at::Tensor& tensor, int peer, int64_t tag);

  const int64_t tag;
  char* const data;
  const int64_t bytes;
  std::atomic<int> peer;  // of a receiver from any: the sender, once the message begins to come
  int64_t moved = 0;      // kept by ShmMessages

 private:
  at::Tensor tensor_;
};
using ShmMessagePtr = std::shared_ptr<ShmMessage>;
ShmMessagePtr shm_send(const at::Tensor& tensor, int to, int64_t tag);
ShmMessagePtr shm_receive(const at::Tensor& tensor, int from, int64_t tag);

// One rank's messages, for users of one channel: a rank that has left that sends none.
class ShmMessages final : public ShmEndpoint {
 public:
  ShmMessages(std::shared_ptr<ShmSegment> segment, int channel, int rank, int size);

  // Throws DistBackendError when there is no memory for the ring to a rank that is sent to for the first time.
  void send(ShmMessagePtr message);
  void receive(ShmMessagePtr message);
  bool progress() override;
  const std::string& disagreement() const override { return disagreement_; }
  // Ranks that hold up a message that was sent or received here.
  std::vector<int> missing(const ShmCall& message) override;
  bool one_will_do(const ShmCall& message) const override;
  bool has_left(int rank) const override { return calls_[rank].left.load() != 0; }
  bool wants_space() override;

 private:
  // A message that came before a receiver asked for it.
  struct Unexpected {
    int64_t tag = 0;
    std::vector<char> data;
    bool whole = false;
  };
  // What comes from one rank.
  struct Incoming {
    ShmMessagePtr message;  // the message that is just coming, if a receiver has it
    Unexpected* unexpected = nullptr;
    int64_t bytes = 0, moved = 0;
    std::list<Unexpected> kept;  // in order of arrival
  };

  MessageCounters& counters(int from, int to) const;
  SlotHead& slot(int from, int to, int64_t place) const;
  bool send_to(int rank);
  bool receive_from(int rank);
  bool take_kept();
  bool begin_message(int from, const SlotHead& head);
  bool awaited(int from) const;
  bool fits(int from, int64_t bytes, const ShmMessage& message);
  void finish(ShmMessage& message);

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_, size_;
  ShmRank* const ranks_;
  ShmCounters* const calls_;                        // of the channel, by rank
  std::vector<std::deque<ShmMessagePtr>> sending_;  // by receiver
  std::vector<bool> has_ring_;
  std::list<ShmMessagePtr> receiving_;  // receivers whose message has not begun to come, in order
  std::vector<Incoming> incoming_;      // by sender
  int busy_ = 0;                        // messages that are not through
  std::string disagreement_;
};

}  // namespace tessera::comm

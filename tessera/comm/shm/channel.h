// ShmChannel: the calls of one Group over shared memory, in flight and in order: moves records through the rings as far as that
// is possible without waiting.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/shm/endpoint.h"
#include "tessera/comm/shm/layout.h"
#include "tessera/comm/shm/op.h"

namespace tessera::comm {

// One thread at a time may use a channel.
class ShmChannel final : public ShmEndpoint {
 public:
  // `base`: start of the segment. The ring of this rank has memory. `numbers[r]`: what rank r is called in messages.
  ShmChannel(char* base, int channel, int rank, int size, std::vector<int> numbers);

  void add(ShmOpPtr op);
  bool progress() override;
  const std::string& disagreement() const override { return disagreement_; }
  // Ranks without which none of the calls moves.
  std::vector<int> missing(const ShmCall&) override { return missing(); }
  std::vector<int> missing();
  bool wants_space() override;
  // The call that has to be through before any other: its number and the place of its first record. Nothing while none is
  // in flight, or its place is not known yet.
  struct Front {
    int64_t number = 0, place = 0;
  };
  std::optional<Front> front() const;
  // How many calls a rank has made.
  int64_t launched(int rank) const { return counters_[rank].launched.load(); }
  // describe() of the call whose first record a rank has at this place, which not all have read. Empty when there is none.
  std::string description(int rank, int64_t place) const;
  // Says that this rank makes no more calls.
  void leave() { counters_[rank_].left.store(1); }
  bool has_left(int rank) const override { return counters_[rank].left.load() != 0; }

 private:
  ShmOp* next_to_send();
  bool send_next();
  bool receive_next();
  void describe_in(SlotHead& head, const ShmOp& op) const;
  void compare(const ShmOp& op, int peer, const SlotHead& head);
  SlotHead& slot(int rank, int64_t place) const;
  bool arrived(int rank, int64_t place);
  bool has_space(int64_t place);
  void ring_others(bool space_only);

  const int rank_, size_;
  const std::vector<int> numbers_;
  ShmRank* const ranks_;
  ShmCounters* const counters_;  // by rank
  std::vector<char*> rings_;
  std::deque<ShmOpPtr> sending_, receiving_;
  int64_t next_place_ = 0;                   // of the next call's first step; -1 while that depends on `open_`
  const ShmOp* open_ = nullptr;              // a call whose number of steps is not known yet
  std::vector<int64_t> written_, consumed_;  // the counters as last seen
  std::vector<const char*> records_;
  std::string disagreement_;
};

}  // namespace tessera::comm

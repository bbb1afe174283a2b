#include "tessera/comm/shm/channel.h"

#include <algorithm>

namespace tessera::comm {
namespace {

constexpr int kRecordsAtOnce = 64;  // at most so many, then other threads of this rank have their turn

OpInfo described_in(const SlotHead& head) {
  return {.name = head.name,
          .label = head.label,
          .bytes = head.bytes,
          .dtype = static_cast<c10::ScalarType>(head.dtype),
          .op = static_cast<ReduceOp>(head.op),
          .root = head.root};
}

const char* payload(const SlotHead& head) {
  return reinterpret_cast<const char*>(&head + 1);
}

}  // namespace

ShmChannel::ShmChannel(char* base, int channel, int rank, int size, std::vector<int> numbers)
    : rank_(rank),
      size_(size),
      numbers_(std::move(numbers)),
      ranks_(reinterpret_cast<ShmRank*>(base + ShmLayout{size}.ranks())),
      counters_(reinterpret_cast<ShmCounters*>(base + ShmLayout{size}.counters()) +
                static_cast<ptrdiff_t>(channel) * size),
      written_(size, 0),
      consumed_(size, 0),
      records_(size, nullptr) {
  for (int r = 0; r < size; ++r)
    rings_.push_back(base + ShmLayout{size}.ring(channel, r));
}

void ShmChannel::add(ShmOpPtr op) {
  op->numbers = &numbers_;
  op->turn = counters_[rank_].launched.fetch_add(1);
  sending_.push_back(op);
  receiving_.push_back(std::move(op));
}

SlotHead& ShmChannel::slot(int rank, int64_t place) const {
  return *reinterpret_cast<SlotHead*>(rings_[rank] + place % kSlots * kSlotBytes);
}

bool ShmChannel::arrived(int rank, int64_t place) {
  if (written_[rank] <= place) written_[rank] = counters_[rank].written.load();
  return written_[rank] > place;
}

bool ShmChannel::has_space(int64_t place) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || consumed_[r] > place - kSlots) continue;
    consumed_[r] = counters_[r].consumed.load();
    if (consumed_[r] <= place - kSlots) return false;
  }
  return true;
}

void ShmChannel::ring_others(bool space_only) {
  for (int r = 0; r < size_; ++r) {
    Doorbell& doorbell = ranks_[r].doorbell;
    if (r != rank_ && (!space_only || doorbell.wants_space.load() != 0)) ring(doorbell);
  }
}

// The call with the next record to write, whose place is known; null when there is none.
ShmOp* ShmChannel::next_to_send() {
  while (!sending_.empty()) {
    ShmOp& op = *sending_.front();
    const auto steps = op.steps();
    if (op.first < 0) {
      if (next_place_ < 0) return nullptr;
      op.first = next_place_;
      next_place_ = steps ? op.first + *steps : -1;
      if (!steps) open_ = &op;
    }
    if (op.written < steps.value_or(op.steps_at_least())) return op.ready(op.written, op.received) ? &op : nullptr;
    if (!steps) return nullptr;
    sending_.pop_front();
  }
  return nullptr;
}

bool ShmChannel::send_next() {
  ShmOp* const op = next_to_send();
  if (op == nullptr) return false;
  const int64_t place = op->first + op->written;
  if (!has_space(place)) return false;
  SlotHead& head = slot(rank_, place);
  describe_in(head, *op);
  if (size_ > 1) op->write(op->written, reinterpret_cast<char*>(&head + 1));
  op->written += 1;
  counters_[rank_].written.store(place + 1);
  ring_others(false);
  return true;
}

void ShmChannel::describe_in(SlotHead& head, const ShmOp& op) const {
  const OpInfo& info = op.info();
  head.hash = op.hash();
  if (op.written > 0) return;
  head.bytes = info.bytes;
  head.dtype = static_cast<int32_t>(info.dtype);
  head.op = static_cast<int32_t>(info.op);
  head.root = info.root;
  put_text(head.name, info.name);
  put_text(head.label, info.label);
}

// Compares calls by their first records: before these all calls have been the same.
void ShmChannel::compare(const ShmOp& op, int peer, const SlotHead& head) {
  if (head.hash == op.hash() || !disagreement_.empty()) return;
  const std::string mine_text = describe_fully(op.info()), their_text = describe_fully(described_in(head));
  const int mine = numbers_[rank_], its = numbers_[peer];
  disagreement_ = mine < its ? tessera::comm::disagreement(mine, mine_text, its, their_text)
                             : tessera::comm::disagreement(its, their_text, mine, mine_text);
}

bool ShmChannel::receive_next() {
  if (receiving_.empty() || !disagreement_.empty()) return false;
  ShmOp& op = *receiving_.front();
  if (op.received >= op.written) return false;  // a rank's own record comes first, see Note [Steps]
  const int64_t place = op.first + op.received;
  bool all = true;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (!arrived(r, place)) {
      all = false;
      continue;
    }
    const SlotHead& head = slot(r, place);
    compare(op, r, head);
    records_[r] = payload(head);
  }
  if (!all || !disagreement_.empty()) return false;
  disagreement_ = op.read(op.received, records_.data());
  if (!disagreement_.empty()) return false;
  op.received += 1;
  const auto steps = op.steps();
  if (open_ == &op && steps) {
    next_place_ = op.first + *steps;
    open_ = nullptr;
  }
  counters_[rank_].consumed.store(place + 1);
  ring_others(true);
  if (op.received == steps) {
    op.done = true;
    ring(ranks_[rank_].doorbell);  // another thread of this rank may wait for it
    receiving_.pop_front();
  }
  return true;
}

bool ShmChannel::progress() {
  for (int i = 0; i < kRecordsAtOnce; ++i) {
    const bool sent = send_next();
    const bool received = receive_next();
    if (!sent && !received) return i > 0;
  }
  return true;
}

bool ShmChannel::wants_space() {
  const ShmOp* const op = next_to_send();
  return op != nullptr && !has_space(op->first + op->written);
}

std::optional<ShmChannel::Front> ShmChannel::front() const {
  if (receiving_.empty() || receiving_.front()->first < 0) return std::nullopt;
  return Front{receiving_.front()->turn, receiving_.front()->first};
}

std::string ShmChannel::description(int rank, int64_t place) const {
  return counters_[rank].written.load() > place ? describe(described_in(slot(rank, place))) : std::string();
}

std::vector<int> ShmChannel::missing() {
  std::vector<int> ranks;
  if (receiving_.empty()) return ranks;
  const ShmOp& op = *receiving_.front();
  const bool space = op.received >= op.written;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || op.first < 0) continue;
    if (space ? consumed_[r] <= op.first + op.written - kSlots : !arrived(r, op.first + op.received))
      ranks.push_back(r);
  }
  return ranks;
}

}  // namespace tessera::comm

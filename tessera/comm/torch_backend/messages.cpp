#include "tessera/comm/torch_backend/messages.h"

#include <algorithm>

#include "tessera/comm/shm/pieces.h"

namespace tessera::comm {

ShmMessage::ShmMessage(const char* name, const at::Tensor& tensor, int to_or_from, int64_t its_tag)
    : ShmCall(info_of(name, tensor, "tag " + std::to_string(its_tag))),
      tag(its_tag),
      data(bytes_of(tensor)),
      bytes(static_cast<int64_t>(tensor.nbytes())),
      peer(to_or_from),
      tensor_(tensor) {}

ShmMessagePtr shm_send(const at::Tensor& tensor, int to, int64_t tag) {
  return std::make_shared<ShmMessage>("send", tensor, to, tag);
}

ShmMessagePtr shm_receive(const at::Tensor& tensor, int from, int64_t tag) {
  return std::make_shared<ShmMessage>("recv", tensor, from, tag);
}

ShmMessages::ShmMessages(std::shared_ptr<ShmSegment> segment, int channel, int rank, int size)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(size),
      ranks_(reinterpret_cast<ShmRank*>(segment_->data() + ShmLayout{size}.ranks())),
      calls_(reinterpret_cast<ShmCounters*>(segment_->data() + ShmLayout{size}.counters()) + int64_t{channel} * size),
      sending_(size),
      has_ring_(size, false),
      incoming_(size) {}

MessageCounters& ShmMessages::counters(int from, int to) const {
  return reinterpret_cast<MessageCounters*>(segment_->data() + ShmLayout{size_}.message_counters())[from * size_ + to];
}

SlotHead& ShmMessages::slot(int from, int to, int64_t place) const {
  return *reinterpret_cast<SlotHead*>(segment_->data() + ShmLayout{size_}.message_ring(from, to) +
                                      place % kMessageSlots * kSlotBytes);
}

void ShmMessages::send(ShmMessagePtr message) {
  const int to = message->peer;
  if (!has_ring_[to]) {
    segment_->reserve(ShmLayout{size_}.message_ring(rank_, to), kMessageRingBytes);
    has_ring_[to] = true;
  }
  sending_[to].push_back(std::move(message));
  busy_ += 1;
}

void ShmMessages::receive(ShmMessagePtr message) {
  receiving_.push_back(std::move(message));
  busy_ += 1;
}

void ShmMessages::finish(ShmMessage& message) {
  busy_ -= 1;
  message.done = true;
  ring(ranks_[rank_].doorbell);  // another thread of this rank may wait for it
}

bool ShmMessages::send_to(int rank) {
  auto& queue = sending_[rank];
  MessageCounters& places = counters(rank_, rank);
  bool moved = false;
  while (!queue.empty()) {
    ShmMessage& message = *queue.front();
    const int64_t place = places.written.load(std::memory_order_relaxed);
    if (place - places.consumed.load() >= kMessageSlots) break;
    SlotHead& head = slot(rank_, rank, place);
    if (message.moved == 0) {
      head.hash = static_cast<uint64_t>(message.tag);
      head.bytes = message.bytes;
    }
    const int64_t count = std::min(kRecordBytes, message.bytes - message.moved);
    copy_to_ring(reinterpret_cast<char*>(&head + 1), message.data + message.moved, count, message.bytes);
    message.moved += count;
    places.written.store(place + 1);
    ring(ranks_[rank].doorbell);
    moved = true;
    if (message.moved < message.bytes) continue;
    finish(message);
    queue.pop_front();
  }
  return moved;
}

bool ShmMessages::fits(int from, int64_t bytes, const ShmMessage& message) {
  if (bytes == message.bytes) return true;
  disagreement_ = split_disagreement(describe(message.info()), from, bytes, rank_, message.bytes);
  return false;
}

// Gives receivers the messages that came before they asked. One that is just coming stays.
bool ShmMessages::take_kept() {
  bool moved = false;
  for (auto it = receiving_.begin(); it != receiving_.end();) {
    ShmMessage& message = **it;
    const int wanted = message.peer;
    bool taken = false;
    for (int from = 0; from < size_ && !taken; ++from) {
      if (wanted >= 0 && wanted != from) continue;
      auto& kept = incoming_[from].kept;
      const auto found =
          std::find_if(kept.begin(), kept.end(), [&](const Unexpected& a) { return a.tag == message.tag; });
      if (found == kept.end() || !found->whole) continue;
      if (!fits(from, static_cast<int64_t>(found->data.size()), message)) return moved;
      copy_bytes(message.data, found->data.data(), message.bytes);
      message.peer = from;
      kept.erase(found);
      taken = true;
    }
    if (taken) {
      finish(message);
      it = receiving_.erase(it);
      moved = true;
    } else {
      ++it;
    }
  }
  return moved;
}

// Whether anybody waits for another message of this rank.
bool ShmMessages::awaited(int from) const {
  return std::any_of(receiving_.begin(), receiving_.end(),
                     [&](const ShmMessagePtr& message) { return message->peer < 0 || message->peer == from; });
}

// Finds where the message at the front belongs; returns whether it may come.
bool ShmMessages::begin_message(int from, const SlotHead& head) {
  Incoming& incoming = incoming_[from];
  const auto tag = static_cast<int64_t>(head.hash);
  // The message stays behind one that was put aside and not yet taken: messages of one tag keep their order.
  const bool behind = std::any_of(incoming.kept.begin(), incoming.kept.end(), [&](auto& a) { return a.tag == tag; });
  const auto found = std::find_if(receiving_.begin(), receiving_.end(), [&](const ShmMessagePtr& message) {
    return !behind && message->tag == tag && (message->peer < 0 || message->peer == from);
  });
  if (found != receiving_.end()) {
    if (!fits(from, head.bytes, **found)) return false;
    incoming.message = *found;
    incoming.message->peer = from;
    receiving_.erase(found);
  } else {
    if (!awaited(from)) return false;
    incoming.kept.push_back({.tag = tag, .data = std::vector<char>(head.bytes)});
    incoming.unexpected = &incoming.kept.back();
  }
  incoming.bytes = head.bytes;
  incoming.moved = 0;
  return true;
}

bool ShmMessages::receive_from(int rank) {
  Incoming& incoming = incoming_[rank];
  MessageCounters& places = counters(rank, rank_);
  bool moved = false;
  while (disagreement_.empty()) {
    const int64_t place = places.consumed.load(std::memory_order_relaxed);
    if (places.written.load() <= place) break;
    const SlotHead& head = slot(rank, rank_, place);
    if (!incoming.message && incoming.unexpected == nullptr && !begin_message(rank, head)) break;
    char* const to = incoming.message ? incoming.message->data : incoming.unexpected->data.data();
    const int64_t count = std::min(kRecordBytes, incoming.bytes - incoming.moved);
    copy_result(to + incoming.moved, reinterpret_cast<const char*>(&head + 1), count, incoming.bytes);
    incoming.moved += count;
    places.consumed.store(place + 1);
    if (ranks_[rank].doorbell.wants_space.load() != 0) ring(ranks_[rank].doorbell);
    moved = true;
    if (incoming.moved < incoming.bytes) continue;
    if (incoming.message) finish(*incoming.message);
    if (incoming.unexpected != nullptr) incoming.unexpected->whole = true;
    incoming.message.reset();
    incoming.unexpected = nullptr;
  }
  return moved;
}

bool ShmMessages::progress() {
  if (busy_ == 0 || !disagreement_.empty()) return false;
  bool moved = take_kept();
  for (int r = 0; r < size_; ++r) {
    moved = send_to(r) || moved;
    moved = receive_from(r) || moved;
  }
  return moved;
}

bool ShmMessages::wants_space() {
  return std::any_of(sending_.begin(), sending_.end(), [](const auto& queue) { return !queue.empty(); });
}

bool ShmMessages::one_will_do(const ShmCall& message) const {
  return static_cast<const ShmMessage&>(message).peer < 0;
}

std::vector<int> ShmMessages::missing(const ShmCall& call) {
  const auto& message = static_cast<const ShmMessage&>(call);
  std::vector<int> ranks;
  const bool sends = std::string_view(message.info().name) == "send";
  for (int r = 0; r < size_ && !message.done; ++r) {
    if (message.peer >= 0 ? message.peer != r : r == rank_) continue;
    const MessageCounters& places = sends ? counters(rank_, r) : counters(r, rank_);
    const int64_t unread = places.written.load() - places.consumed.load();
    if (sends ? unread >= kMessageSlots : unread == 0) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace tessera::comm

#include "tessera/comm/torch_backend/mail.h"

#include <algorithm>

#include "tessera/comm/shm/pieces.h"

namespace tessera::comm {

ShmLetter::ShmLetter(const char* name, const at::Tensor& tensor, int to_or_from, int64_t its_tag)
    : ShmCall(info_of(name, tensor, "tag " + std::to_string(its_tag))),
      tag(its_tag),
      data(bytes_of(tensor)),
      bytes(static_cast<int64_t>(tensor.nbytes())),
      peer(to_or_from),
      tensor_(tensor) {}

ShmLetterPtr shm_send(const at::Tensor& tensor, int to, int64_t tag) {
  return std::make_shared<ShmLetter>("send", tensor, to, tag);
}

ShmLetterPtr shm_receive(const at::Tensor& tensor, int from, int64_t tag) {
  return std::make_shared<ShmLetter>("recv", tensor, from, tag);
}

ShmMail::ShmMail(std::shared_ptr<ShmSegment> segment, int channel, int rank, int size)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(size),
      ranks_(reinterpret_cast<ShmRank*>(segment_->data() + ShmLayout{size}.ranks())),
      calls_(reinterpret_cast<ShmCounters*>(segment_->data() + ShmLayout{size}.counters()) + int64_t{channel} * size),
      sending_(size),
      has_ring_(size, false),
      incoming_(size) {}

MailCounters& ShmMail::counters(int from, int to) const {
  return reinterpret_cast<MailCounters*>(segment_->data() + ShmLayout{size_}.mail_counters())[from * size_ + to];
}

SlotHead& ShmMail::slot(int from, int to, int64_t place) const {
  return *reinterpret_cast<SlotHead*>(segment_->data() + ShmLayout{size_}.mail_ring(from, to) +
                                      place % kMailSlots * kSlotBytes);
}

void ShmMail::send(ShmLetterPtr letter) {
  const int to = letter->peer;
  if (!has_ring_[to]) {
    segment_->reserve(ShmLayout{size_}.mail_ring(rank_, to), kMailRingBytes);
    has_ring_[to] = true;
  }
  sending_[to].push_back(std::move(letter));
  busy_ += 1;
}

void ShmMail::receive(ShmLetterPtr letter) {
  receiving_.push_back(std::move(letter));
  busy_ += 1;
}

void ShmMail::finish(ShmLetter& letter) {
  busy_ -= 1;
  letter.done = true;
  ring(ranks_[rank_].bell);  // for another thread of this rank that waits for it
}

bool ShmMail::send_to(int rank) {
  auto& queue = sending_[rank];
  MailCounters& places = counters(rank_, rank);
  bool moved = false;
  while (!queue.empty()) {
    ShmLetter& letter = *queue.front();
    const int64_t place = places.written.load(std::memory_order_relaxed);
    if (place - places.consumed.load() >= kMailSlots) break;
    SlotHead& head = slot(rank_, rank, place);
    if (letter.moved == 0) {
      head.hash = static_cast<uint64_t>(letter.tag);
      head.bytes = letter.bytes;
    }
    const int64_t count = std::min(kRecordBytes, letter.bytes - letter.moved);
    copy_to_ring(reinterpret_cast<char*>(&head + 1), letter.data + letter.moved, count, letter.bytes);
    letter.moved += count;
    places.written.store(place + 1);
    ring(ranks_[rank].bell);
    moved = true;
    if (letter.moved < letter.bytes) continue;
    finish(letter);
    queue.pop_front();
  }
  return moved;
}

bool ShmMail::fits(int from, int64_t bytes, const ShmLetter& letter) {
  if (bytes == letter.bytes) return true;
  disagreement_ = split_disagreement(describe(letter.info()), from, bytes, rank_, letter.bytes);
  return false;
}

// Gives letters what has been put aside for them. One that waits for a message that is just coming stays.
bool ShmMail::take_kept() {
  bool moved = false;
  for (auto it = receiving_.begin(); it != receiving_.end();) {
    ShmLetter& letter = **it;
    const int wanted = letter.peer;
    bool taken = false;
    for (int from = 0; from < size_ && !taken; ++from) {
      if (wanted >= 0 && wanted != from) continue;
      auto& kept = incoming_[from].kept;
      const auto found = std::find_if(kept.begin(), kept.end(), [&](const Aside& a) { return a.tag == letter.tag; });
      if (found == kept.end() || !found->whole) continue;
      if (!fits(from, static_cast<int64_t>(found->data.size()), letter)) return moved;
      copy_bytes(letter.data, found->data.data(), letter.bytes);
      letter.peer = from;
      kept.erase(found);
      taken = true;
    }
    if (taken) {
      finish(letter);
      it = receiving_.erase(it);
      moved = true;
    } else {
      ++it;
    }
  }
  return moved;
}

// Whether anybody waits for another message of this rank.
bool ShmMail::awaited(int from) const {
  return std::any_of(receiving_.begin(), receiving_.end(),
                     [&](const ShmLetterPtr& letter) { return letter->peer < 0 || letter->peer == from; });
}

// Finds out where the message at the front belongs; whether it may come.
bool ShmMail::begin_message(int from, const SlotHead& head) {
  Incoming& incoming = incoming_[from];
  const auto tag = static_cast<int64_t>(head.hash);
  // After one that was put aside and not yet taken: those of one tag keep their order.
  const bool behind = std::any_of(incoming.kept.begin(), incoming.kept.end(), [&](auto& a) { return a.tag == tag; });
  const auto found = std::find_if(receiving_.begin(), receiving_.end(), [&](const ShmLetterPtr& letter) {
    return !behind && letter->tag == tag && (letter->peer < 0 || letter->peer == from);
  });
  if (found != receiving_.end()) {
    if (!fits(from, head.bytes, **found)) return false;
    incoming.letter = *found;
    incoming.letter->peer = from;
    receiving_.erase(found);
  } else {
    if (!awaited(from)) return false;
    incoming.kept.push_back({.tag = tag, .data = std::vector<char>(head.bytes)});
    incoming.aside = &incoming.kept.back();
  }
  incoming.bytes = head.bytes;
  incoming.moved = 0;
  return true;
}

bool ShmMail::receive_from(int rank) {
  Incoming& incoming = incoming_[rank];
  MailCounters& places = counters(rank, rank_);
  bool moved = false;
  while (disagreement_.empty()) {
    const int64_t place = places.consumed.load(std::memory_order_relaxed);
    if (places.written.load() <= place) break;
    const SlotHead& head = slot(rank, rank_, place);
    if (!incoming.letter && incoming.aside == nullptr && !begin_message(rank, head)) break;
    char* const to = incoming.letter ? incoming.letter->data : incoming.aside->data.data();
    const int64_t count = std::min(kRecordBytes, incoming.bytes - incoming.moved);
    copy_result(to + incoming.moved, reinterpret_cast<const char*>(&head + 1), count, incoming.bytes);
    incoming.moved += count;
    places.consumed.store(place + 1);
    if (ranks_[rank].bell.wants_space.load() != 0) ring(ranks_[rank].bell);
    moved = true;
    if (incoming.moved < incoming.bytes) continue;
    if (incoming.letter) finish(*incoming.letter);
    if (incoming.aside != nullptr) incoming.aside->whole = true;
    incoming.letter.reset();
    incoming.aside = nullptr;
  }
  return moved;
}

bool ShmMail::progress() {
  if (busy_ == 0 || !disagreement_.empty()) return false;
  bool moved = take_kept();
  for (int r = 0; r < size_; ++r) {
    moved = send_to(r) || moved;
    moved = receive_from(r) || moved;
  }
  return moved;
}

bool ShmMail::wants_space() {
  return std::any_of(sending_.begin(), sending_.end(), [](const auto& queue) { return !queue.empty(); });
}

bool ShmMail::one_will_do(const ShmCall& letter) const {
  return static_cast<const ShmLetter&>(letter).peer < 0;
}

std::vector<int> ShmMail::missing(const ShmCall& call) {
  const auto& letter = static_cast<const ShmLetter&>(call);
  std::vector<int> ranks;
  const bool sends = std::string_view(letter.info().name) == "send";
  for (int r = 0; r < size_ && !letter.done; ++r) {
    if (letter.peer >= 0 ? letter.peer != r : r == rank_) continue;
    const MailCounters& places = sends ? counters(rank_, r) : counters(r, rank_);
    const int64_t unread = places.written.load() - places.consumed.load();
    if (sends ? unread >= kMailSlots : unread == 0) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace tessera::comm

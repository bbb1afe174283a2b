#include "tessera/pipeline/link_end.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/pipeline/link_message.h"

namespace tessera::pipeline {

std::ostream& operator<<(std::ostream& out, const Sample& sample) {
  return out << sample.text;
}

LinkEnd::LinkEnd(LinkRanks ranks, LinkEngine engine, bool sends)
    : ranks_(std::move(ranks)),
      engine_(std::move(engine)),
      sends_(sends),
      part_((sends ? ranks_.source : ranks_.target).part(ranks_.place)),
      me_(name_of(sends, ranks_.place)) {
  check(ranks_.dims, ranks_.source, ranks_.sides[0]);
  check(ranks_.dims, ranks_.target, ranks_.sides[1]);
  std::vector<int> places = takers();
  for (const int place : givers())
    if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(place);
  const Line outputs{ranks_.p2p, ranks_.tag, "outputs"}, gradients{ranks_.p2p, ranks_.tag + 1, "gradients"};
  for (const int place : places) {
    if (is_own(place)) continue;
    const Peer peer{rank_of(!sends, place), name_of(!sends, place)};
    wires_[place] =
        std::make_unique<Wire>(peer, sends ? outputs : gradients, sends ? gradients : outputs, engine_.device);
  }
}

bool LinkEnd::is_own(int place) const {
  return rank_of(!sends_, place) == ranks_.rank;
}

void LinkEnd::pair_with(const LinkEnd& other) {
  TESSERA_CHECK(!joined_ || joined_->lock() == other.self_, "hybrid", me_,
                ": hand_over() has joined it to another end");
  joined_ = other.self_;
}

std::string LinkEnd::name_of(bool source, int place) const {
  return c10::str("rank ", place, " of ", ranks_.sides[source ? 0 : 1]);
}

std::vector<int> LinkEnd::takers() const {
  const Layout &mine = sends_ ? ranks_.source : ranks_.target, &other = sends_ ? ranks_.target : ranks_.source;
  std::vector<int> places;
  for (int place = 0; place < other.ranks(); ++place)
    if (place % mine.replicas == ranks_.place % mine.replicas) places.push_back(place);
  return places;
}

std::vector<int> LinkEnd::givers() const {
  const Layout& other = sends_ ? ranks_.target : ranks_.source;
  std::vector<int> places;
  for (int part = 0; part < other.parts(); ++part)
    places.push_back(other.holder(part, ranks_.place));
  return places;
}

void LinkEnd::put(int taker, const LinkMessage& message) {
  if (is_own(taker)) {
    TESSERA_CHECK(joined_, "hybrid", me_, ": a process that is of both sides hands over by hand_over()");
    LinkEnd& other = there<LinkEnd>(*joined_);
    other.from_joined_.push_back(message);
    for (at::Tensor& piece : other.from_joined_.back().pieces)
      piece = piece.clone(at::MemoryFormat::Contiguous);  // the two engines may change theirs
    return;
  }
  Tensors tensors{at::tensor(message.header, at::kLong)};
  tensors.insert(tensors.end(), message.pieces.begin(), message.pieces.end());
  wires_.at(taker)->send({tensors, message.note}, sent_[taker]++);
}

void LinkEnd::keep_behind(int taker, int64_t most) {
  if (is_own(taker)) return;
  waiting(name_of(!sends_, taker), "word of what was taken", [&] { wires_.at(taker)->drain(most); });
}

LinkEnd::LinkMessage LinkEnd::take(int giver, const std::string& what) {
  if (is_own(giver)) {
    TESSERA_CHECK(!from_joined_.empty(), "hybrid", me_, ": a process that is of both sides hands over by hand_over()");
    LinkMessage message = std::move(from_joined_.front());
    from_joined_.pop_front();
    return message;
  }
  return waiting(name_of(!sends_, giver), what, [&]() -> LinkMessage {
    Wire& wire = *wires_.at(giver);
    auto [tensors, note] = wire.receive(read_[giver]++);
    try {
      wire.acknowledge();
    } catch (const c10::DistBackendError&) {
      // The giver has gone since: it does not wait for the acknowledgement.
    }
    return {numbers_of(tensors.at(0)), {tensors.begin() + 1, tensors.end()}, std::move(note)};
  });
}

LinkEnd::LinkMessage LinkEnd::read(int giver, const std::string& what) {
  LinkMessage message = take(giver, what);
  TESSERA_CHECK(message.header[0] == kOfTensors, "hybrid", me_, " waits for ", what, ", but ", name_of(!sends_, giver),
                " has ended step ", message.header[1], " after ", message.header[2], " micro-batches");
  return message;
}

void LinkEnd::end_step(const std::vector<std::string>& left, const char* call) {
  TESSERA_CHECK(!joined_, "hybrid", me_, ": ends of hand_over() have no step(); leave it out");
  TESSERA_CHECK(left.empty(), "hybrid", me_, ": step ", step_, " ends, but the gradients of samples [",
                c10::Join(", ", left), "] are still out; call ", call, "() for each before step()");
  for (const int taker : takers())
    put(taker, {{kEndOfStep, step_, since_}, {}});
  for (const int giver : givers()) {
    const Header header = take(giver, c10::str("word that step ", step_, " has ended")).header;
    TESSERA_CHECK(header[0] == kEndOfStep && header[2] == since_, "hybrid", me_, " has ended step ", step_, " after ",
                  since_, " micro-batches, but ", name_of(!sends_, giver), " had ",
                  header[0] == kEndOfStep ? std::to_string(header[2]) : "more", " micro-batches in step ", step_);
  }
  for (const int taker : takers())
    keep_behind(taker, 0);
  // A rank that leaves next takes along no acknowledgement or sizes that another one waits for.
  for (const auto& [place, wire] : wires_)
    waiting(name_of(!sends_, place), "word of what was taken", [&wire = *wire] { wire.settle(); });
  for (const auto& [place, wire] : beside_)
    waiting(name_of(true, place), "word of what was taken", [&wire = *wire] { wire.settle(); });
  ++step_;
  since_ = 0;
}

std::vector<Wire*> LinkEnd::wires() {
  std::vector<Wire*> all;
  for (const auto* part : {&wires_, &beside_})
    for (const auto& [place, wire] : *part)
      all.push_back(wire.get());
  return all;
}

void LinkEnd::abort(const std::string& reason) {
  for (Wire* const wire : wires()) {
    try {
      wire->send_failure(c10::str(me_, " failed: ", reason));
    } catch (const c10::DistBackendError&) {
      // The rank is lost: nobody waits there.
    }
  }
}

void LinkEnd::close() {
  const auto wait = [](const auto& body) {
    try {
      body();
    } catch (const c10::DistBackendError&) {
      // The rank is lost, or has given up: nobody takes what is left.
    }
  };
  for (const auto& [place, wire] : wires_)
    wait([&wire = *wire] { wire.drain(0); });
  for (const auto& [place, wire] : beside_)
    wait([&wire = *wire] { wire.settle(); });
}

}  // namespace tessera::pipeline

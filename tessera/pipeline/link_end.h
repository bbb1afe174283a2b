// What both ends of a link have: who is where, messages to and from the ranks of the other side, and the end of a step.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/pipeline/boxes.h"
#include "tessera/pipeline/wire.h"

namespace tessera::pipeline {

// A link, as one of its ranks sees it.
struct LinkRanks {
  Layout source = {}, target = {};
  int source_rank = 0, target_rank = 0;  // the first one of each side in the p2p
  int place = 0;                         // this rank's place in its side
  int rank = 0;                          // this rank's number in the p2p
  comm::PointToPointPtr p2p = {};        // null where there is one rank
  int tag = 0;                           // this tag and the two behind it are the link's
  Dims dims = {};
  std::array<std::string, 2> sides{"source", "target"};  // in errors, as "rank 0 of source"
};

// What a link asks of the engine behind an end; none of it: a link without an engine.
struct LinkEngine {
  std::function<at::Tensor(const at::Tensor&)> scale = {};  // scales outputs, for a backward
  std::function<double()> gradient_scale = {};              // what gradients of the engine's inputs carry
  at::Device device = at::kCPU;                             // where what is received belongs
};

// A micro-batch by a number or name of the user's own, as a text.
struct Sample {
  Sample(int64_t number) : text(std::to_string(number)) {}  // NOLINT(google-explicit-constructor)
  Sample(std::string name) : text(std::move(name)) {}       // NOLINT(google-explicit-constructor)
  auto operator<=>(const Sample&) const = default;
  std::string text;
};
std::ostream& operator<<(std::ostream& out, const Sample& sample);

class LinkEnd {
 public:
  LinkEnd(const LinkEnd&) = delete;
  LinkEnd& operator=(const LinkEnd&) = delete;
  // Whoever waits for this rank, now or later, gets a DistBackendError with `reason`. Waits for nobody.
  void abort(const std::string& reason);
  // Waits until what was sent is taken, or will not be any more.
  void close();

 protected:
  using Header = std::vector<int64_t>;
  struct LinkMessage {
    Header header;
    Tensors pieces;
    std::string note = {};
  };

  LinkEnd(LinkRanks ranks, LinkEngine engine, bool sends);
  ~LinkEnd() = default;
  // Pairs this end with the other one of this very process.
  void pair_with(const LinkEnd& other);
  // The other end; UsageError where it is gone.
  template <class End>
  static End& there(const std::weak_ptr<LinkEnd>& end);
  // What gradients of this end's engine carry.
  double gradient_scale() const { return engine_.gradient_scale ? engine_.gradient_scale() : 1.0; }
  bool is_own(int place) const;  // a place on the other side is this rank, too
  int rank_of(bool source, int place) const { return (source ? ranks_.source_rank : ranks_.target_rank) + place; }
  std::string name_of(bool source, int place) const;
  // Places of the other side's ranks: those that this rank gives to, and by part those that give to it.
  std::vector<int> takers() const;
  std::vector<int> givers() const;
  void put(int taker, const LinkMessage& message);
  // Waits until a taker has so many messages to take, at most.
  void keep_behind(int taker, int64_t most);
  // The next message of a giver, which is to be `what`; read(): one of tensors, UsageError where the giver has ended the step.
  LinkMessage take(int giver, const std::string& what);
  LinkMessage read(int giver, const std::string& what);
  // Runs body() for a message of that rank; DistBackendError that names both where the rank is lost or could not go on.
  template <class F>
  auto waiting(const std::string& peer, const std::string& what, const F& body) const;
  void end_step(const std::vector<std::string>& left, const char* call);

  const LinkRanks ranks_;
  const LinkEngine engine_;
  const bool sends_;
  const int part_;        // this rank's part in its side
  const std::string me_;  // in errors
  int64_t number_ = 0;    // the next message's number
  int64_t since_ = 0;     // messages since the last step()
  int64_t step_ = 0;
  std::map<int, std::unique_ptr<Wire>> beside_;                 // to other ranks of this side, by place
  const std::shared_ptr<LinkEnd> self_{this, [](LinkEnd*) {}};  // owns nothing: for those who may outlive it

 private:
  std::vector<Wire*> wires();

  std::map<int, std::unique_ptr<Wire>> wires_;  // by place on the other side
  std::optional<std::weak_ptr<LinkEnd>> joined_;
  std::deque<LinkMessage> from_joined_;
  std::map<int, int64_t> sent_, read_;  // messages of each wire
};

template <class End>
End& LinkEnd::there(const std::weak_ptr<LinkEnd>& end) {
  const std::shared_ptr<LinkEnd> found = end.lock();
  TESSERA_CHECK(found != nullptr, "hybrid", "an end of hand_over() is gone; keep both until the last backward");
  return static_cast<End&>(*found);
}

template <class F>
auto LinkEnd::waiting(const std::string& peer, const std::string& what, const F& body) const {
  std::string text;
  try {
    return body();
  } catch (const StageFailed& error) {
    text = error.what_without_backtrace();
  } catch (const c10::DistBackendError& error) {
    text = error.what_without_backtrace();
    if (const auto begin = text.find(peer); begin != std::string::npos) text.erase(0, begin);
  }
  TESSERA_CHECK_DIST(false, "hybrid", me_, " waits for ", what, ", but ", text.substr(0, text.find('\n')));
}

}  // namespace tessera::pipeline

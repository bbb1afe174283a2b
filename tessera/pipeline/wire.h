// Wire: messages between stages, lists of tensors whose form goes with them.
//
// A message is a header, the form of the tensors and the note where they are others than those of the message before, and the
// tensors. So their number, shapes and dtypes may change from one message to the next, and cost nothing where they do not.
//
// Note [What is under way]
//   A tensor that was sent is kept until the other side has taken it, and not every back end says when: Gloo does once it is asked
//   to wait. So a sender asks only for what the receiver has acknowledged. Every header acknowledges the messages that came the
//   other way: a gradient that comes back acknowledges activations, the next activation acknowledges gradients, and the schedule
//   bounds what is under way. Where nothing comes back (an evaluation) the receiver sends an acknowledgement of each
//   message, and the sender reads that before it runs too far ahead. All waits are for messages, so each of them ends with a failure
//   of the other side. The ends of a link acknowledge every message: how many are sent before something comes back is their user's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/point_to_point.h"

namespace tessera::pipeline {

using Tensors = std::vector<at::Tensor>;

struct Message {
  Tensors tensors;
  std::string note = {};  // the front end's, which alone reads it: how values of its language hold the tensors
};

// Another rank could not go on; the text is its error, as that rank announces it.
class StageFailed final : public c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};

// The rank at the other end of a wire.
struct Peer {
  int rank = 0;      // the peer's number among those of the point-to-point
  std::string name;  // in errors, as "stage 1 (rank 2)"
};

// One direction of a wire. Both ends use one tag, and no other wire does so in this direction.
struct Line {
  comm::PointToPointPtr p2p;
  int tag = 0;
  std::string what;  // in words, for errors, as "activations"
};

// Messages between this rank and another, both ways.
class Wire {
 public:
  // Messages are received on `device`. Both lines have the peer's rank.
  Wire(Peer peer, Line outgoing, Line incoming, at::Device device);

  // Sends tensors of any dtype and layout; undefined ones arrive as such. `number` is that of the message. Waits for nobody.
  void send(const Message& message, int64_t number);
  // Sends a failure in place of the next message: this side cannot go on.
  void send_failure(const std::string& text);
  // Does so, and nothing where the other side is lost: nobody waits there.
  void try_to_send_failure(const std::string& text);

  // Returns the next message: leaves that require a gradient where the sender's do. UsageError when it has another number;
  // StageFailed when the other side could not go on; DistBackendError, which names the other side, when it is lost.
  Message receive(int64_t number);

  // Acknowledges the messages that were taken, where no other message goes this way.
  void acknowledge();
  // Waits, where nothing else comes this way, until at most so many messages are under way. Errors as of receive().
  void await_taken(int64_t most);
  // Does so for messages of tensors, where others may come this way: they are kept for receive(). Ends for good only where the
  // other side acknowledges every message.
  void drain(int64_t most);
  // Waits until all that was sent is taken, acknowledged or not.
  void settle();

  // Messages that the other side has not acknowledged.
  int64_t under_way() const { return static_cast<int64_t>(under_way_.size()); }
  int64_t forms() const { return forms_; }  // messages that had their form with them

 private:
  using Header = std::vector<int64_t>;

  void begin(int64_t what, int64_t number, int64_t form, int64_t note);
  void put(const at::Tensor& tensor);
  void put_bytes(const std::string& text);
  void take(const at::Tensor& tensor);
  std::vector<int64_t> take_numbers(int64_t count);
  std::string take_bytes(int64_t count);
  Header take_header();
  int64_t awaited() const;
  void settle_first();
  Message take_message(const Header& header);
  template <class F>
  auto guarded(const Line& line, const F& body) const;

  const Peer peer_;
  const Line outgoing_, incoming_;
  const at::Device device_;
  struct Form {
    std::vector<int64_t> tensors;
    std::string note;
    bool operator==(const Form&) const = default;
  };
  Form sent_form_, taken_form_;
  struct Sent {
    int64_t what;
    std::vector<int64_t> tensors;  // numbers of the tensors for settle()
  };
  std::deque<Sent> under_way_;
  std::deque<std::pair<Header, Message>> early_;  // came while drain() waited
  int64_t acknowledged_ = 0;                      // messages of this side that the other one has taken
  int64_t taken_ = 0;                             // messages of the other side that came here
  int64_t forms_ = 0;
};

}  // namespace tessera::pipeline

// A differentiable hand-over between two engines on ranks of their own: outputs go forward, gradients come back. What goes from
// which rank to which follows from both meshes (pipeline/boxes.h); averages and loss scales are as docs/hybrid.md says.
//
//   const tessera::nn::Link link{.source = 0, .target = 1, .sides = {"tower", "reader"}};
//   LinkSender sender(link, parts, &engine.core());               LinkReceiver receiver(link, parts, &engine.core());
//   sender.send({engine.forward(x)}, micro);                      const Tensors got = receiver.receive(micro);
//   sender.backward(micro);                                       loss_of(got).backward();
//   tessera::nn::step_together(engine, parts);                    receiver.give_back(micro);
//   sender.step();                                                tessera::nn::step_together(engine, parts);
//                                                                 receiver.step();
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/parts.h"
#include "tessera/engine/engine.h"
#include "tessera/pipeline/boxes.h"
#include "tessera/pipeline/wire.h"

namespace tessera::nn {

using Tensors = std::vector<at::Tensor>;

// What both sides must agree on.
struct Link {
  int source = 0, target = 1;            // parts of the program
  int batch_dim = 0;                     // of every tensor, along which batches of ranks lie
  std::optional<int> sequence_dim = {};  // the one that ranks of a sequence cut; for packed tokens it may be the same
  std::array<std::string, 2> sides{"source", "target"};  // in errors
  int number = 0;                                        // another one for each link of the same two parts
};

class LinkSender;
class LinkReceiver;

// For ranks that are of both sides (comm::environment_overlaid_parts): what receive() would return of send(outputs), inside one
// graph, so that loss.backward() goes through both engines. The ends are these ranks' and serve nothing else; they have no
// step(). Collective over both sides, in the backward too.
Tensors hand_over(LinkSender& sender, LinkReceiver& receiver, const Tensors& outputs, int64_t sample,
                  const std::optional<pipeline::Sizes>& samples = {});

// What both ends have.
class LinkEnd {
 public:
  LinkEnd(const LinkEnd&) = delete;
  LinkEnd& operator=(const LinkEnd&) = delete;
  // Whoever waits for this rank, now or later, gets a DistBackendError with `reason`. Waits for nobody.
  void abort(const std::string& reason);

 protected:
  using Header = std::vector<int64_t>;
  struct Message {
    Header header;
    Tensors pieces;
  };

  LinkEnd(const Link& link, const comm::Parts& parts, engine::Engine* engine, bool sends);
  // The other end of this very process.
  void pair_with(const LinkEnd& other);
  // UsageError where it is gone.
  template <class End>
  static End& there(const std::weak_ptr<LinkEnd>& end);
  std::string name_of(bool source, int place) const;
  // Places of the other side's ranks: those that this rank gives to, and by part those that give to it.
  std::vector<int> takers() const;
  std::vector<int> givers() const;
  void put(int taker, const Header& header, const Tensors& pieces);
  // The next message of a giver; read(): of tensors, UsageError where the giver has ended the step.
  Message take(int giver);
  Message read(int giver, const std::string& what);
  void end_step(const std::vector<int64_t>& left, const char* call);

  const Link link_;
  const comm::Parts parts_;
  engine::Engine* const engine_;
  const bool sends_;
  const pipeline::Layout source_, target_;
  const pipeline::Dims dims_;
  const std::string me_;  // in errors
  int64_t number_ = 0;    // of the next message
  int64_t since_ = 0;     // messages since the last step()
  int64_t step_ = 0;
  const std::shared_ptr<LinkEnd> self_{this, [](LinkEnd*) {}};  // owns nothing: for those who may outlive it

 private:
  bool is_own(int place) const;  // a place on the other side is this process, too

  std::map<int, std::unique_ptr<pipeline::Wire>> wires_;  // by place on the other side
  std::optional<std::weak_ptr<LinkEnd>> joined_;
  std::deque<Message> from_joined_;
  std::map<int, int64_t> sent_, read_;  // messages of each wire
};

// The outputs' end, on a rank of the source. `engine` (may be null): whose outputs are sent; its loss scale holds in backward().
class LinkSender : public LinkEnd {
 public:
  LinkSender(const Link& link, const comm::Parts& parts, engine::Engine* engine = nullptr);

  // Tensors with a graph arrive as leaves that require gradients; sizes may change from call to call. `sample`: the
  // micro-batch, which receive() must ask for. `samples`: how many rows of batch_dim each sample of this rank's batch has
  // (none: one), where batches are dealt out to another number of ranks. Waits for no rank of the target, and for those of the
  // source that share a batch or have others to come to the same call.
  void send(const Tensors& outputs, int64_t sample, const std::optional<pipeline::Sizes>& samples = {});
  // Waits for the gradient of a sample and runs the backward of its outputs with it. In any order.
  void backward(int64_t sample);
  // Once a step, on all ranks of both sides: UsageError where the numbers of messages differ, or a gradient is still out.
  void step();

 private:
  friend struct HandOver;
  struct Sent {
    int64_t number;
    Tensors trained;
    std::vector<std::vector<pipeline::Box>> held, wanted;  // of the trained ones: by part of the source, of the target
  };
  std::vector<Header> exchange(const Header& mine);
  Sent announce(const Tensors& outputs, int64_t sample, const std::optional<pipeline::Sizes>& samples);
  // Of its trained tensors; undefined: zero.
  Tensors gradients_of(const Sent& sent, int64_t sample);
  Message gradient(int giver, int64_t number, int64_t sample);

  std::vector<std::unique_ptr<pipeline::Wire>> beside_;  // by part of the source; null: this one
  std::map<int64_t, Sent> open_;                         // by sample: their gradients are to come
  std::map<std::pair<int, int64_t>, Message> early_;  // gradients of samples that nobody has asked for: giver, number
};

// The inputs' end, on a rank of the target.
class LinkReceiver : public LinkEnd {
 public:
  LinkReceiver(const Link& link, const comm::Parts& parts, engine::Engine* engine = nullptr);

  // Waits for the next message, which must be of `sample`, and returns this rank's part of what was sent.
  Tensors receive(int64_t sample);
  // Sends the gradients of what receive(sample) returned: those in .grad(), or one for each tensor that requires some;
  // undefined: zero. Waits for nobody.
  void give_back(int64_t sample, const std::optional<Tensors>& gradients = {});
  void step();

 private:
  friend struct HandOver;
  struct Received {
    int64_t number;
    Tensors leaves;  // that require gradients
    std::vector<std::vector<pipeline::Box>> held, wanted;
  };
  std::pair<Tensors, Received> take_in(int64_t sample);
  void send_back(const Received& received, int64_t sample, const Tensors& gradients);

  std::map<int64_t, Received> open_;
};

}  // namespace tessera::nn

// A differentiable hand-over between two engines on ranks of their own: outputs go forward, gradients come back. Which rank sends
// what to which follows from both layouts (boxes.h); averages and loss scales are as docs/hybrid.md says.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/pipeline/link_end.h"

namespace tessera::pipeline {

class LinkSender;
class LinkReceiver;

// For ranks that are on both sides: what receive() would return of send(outputs), inside one graph, so that loss.backward()
// goes through both engines. The ends serve nothing else; they have no step(). Collective over both sides, in the backward too.
Tensors hand_over(LinkSender& sender, LinkReceiver& receiver, const Tensors& outputs, const Sample& sample,
                  const std::optional<Sizes>& samples = {}, std::string note = {});
// Of the same call, on a rank of the target alone: what has come, inside its graph, so that gradients go back while the backward
// runs. (What ends a backward may wait for the ranks of both sides.) A rank of the source alone has send() and backward().
Message hand_over(LinkReceiver& receiver, const Sample& sample);

// The outputs' end, on a rank of the source. Used by one thread at a time, as the other end.
class LinkSender : public LinkEnd {
 public:
  // Value error where ranks of a side share a sequence and no dim of it is known.
  LinkSender(LinkRanks ranks, LinkEngine engine);

  // Tensors with a graph arrive as leaves that require gradients; sizes may change between calls, and tensors after a call.
  // `samples`: how many rows of the batch dim each sample of this rank's batch has (none: one), where batches are dealt out to
  // another number of ranks. `note` arrives as it is; the first rank's counts. Waits for the ranks of the source that
  // share a batch or have others to come to the same call, and where no tensor has a graph for the target to be 8 such
  // messages behind at most; else for nobody.
  void send(const Tensors& outputs, const Sample& sample, const std::optional<Sizes>& samples = {},
            const std::string& note = {});
  // Waits for the gradient of a sample and runs the backward of its outputs with it; samples come in any order.
  void backward(const Sample& sample);
  // For a front end that runs the backward itself: outputs, times the loss scale, and their gradients, where there is one.
  std::pair<Tensors, Tensors> gradients(const Sample& sample);
  // After a backward that threw this `error`: UsageError where another one has freed the graph.
  void check_not_freed(const Sample& sample, const std::string& error) const;
  // To be called once a step, on all ranks of both sides: UsageError where numbers of messages differ, or a gradient is out.
  void step();

 private:
  friend struct HandOver;
  friend Tensors hand_over(LinkSender&, LinkReceiver&, const Tensors&, const Sample&, const std::optional<Sizes>&,
                           std::string);
  struct Sent {
    int64_t number;
    Tensors trained;
    std::vector<at::Device> devices;
    std::vector<std::vector<Box>> held, wanted;  // boxes of the trained tensors: by part of the source, of the target
  };
  std::vector<Header> exchange(const Header& mine);
  Sent announce(const Tensors& outputs, const Sample& sample, const std::optional<Sizes>& samples,
                const std::string& note);
  // Gradients of the sample's trained tensors; undefined: zero.
  Tensors gradients_of(const Sent& sent, const Sample& sample);
  LinkMessage gradient(int giver, int64_t number, const Sample& sample);

  std::map<Sample, Sent> open_;                           // samples whose gradients are to come
  std::map<std::pair<int, int64_t>, LinkMessage> early_;  // gradients that nobody has asked for: giver, number
};

// The inputs' end, on a rank of the target.
class LinkReceiver : public LinkEnd {
 public:
  LinkReceiver(LinkRanks ranks, LinkEngine engine);

  // Waits for the next message, which must be of `sample`, and returns this rank's part of what was sent.
  Tensors receive(const Sample& sample) { return receive_message(sample).tensors; }
  Message receive_message(const Sample& sample);  // the message with its note
  // Sends the gradients of what receive(sample) returned: those in .grad(), or one for each tensor that requires some;
  // undefined: zero. Waits for nobody.
  void give_back(const Sample& sample, const std::optional<Tensors>& gradients = {});
  void step();

 private:
  friend struct HandOver;
  struct Received {
    int64_t number;
    Tensors leaves;  // tensors that require gradients
    std::vector<std::vector<Box>> held, wanted;
  };
  std::pair<Message, Received> take_in(const Sample& sample);
  void send_back(const Received& received, const Sample& sample, const Tensors& gradients);

  std::map<Sample, Received> open_;
};

// What a link asks of an engine of either front end, which lives as long as the ends do; null: none.
template <class EnginePtr>
LinkEngine link_engine(const EnginePtr& engine) {
  if (engine == nullptr) return {};
  return {.scale = [engine](const at::Tensor& output) { return engine->scaling().scale(output); },
          .gradient_scale =
              [engine] { return engine->scaling().scaler().needed() ? engine->scaling().gradient_scale() : 1.0; },
          .device = engine->params().empty() ? at::Device(at::kCPU) : engine->params().front().tensor.device()};
}

}  // namespace tessera::pipeline

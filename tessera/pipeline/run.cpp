#include "tessera/pipeline/run.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <iterator>

#include "tessera/base/error.h"
#include "tessera/pipeline/freed_graph.h"

namespace tessera::pipeline {
namespace {

template <class Map>
auto taken(Map& from, typename Map::key_type cell) {
  return std::move(from.extract(cell).mapped());
}

Tensors trained(const Tensors& tensors) {
  Tensors result;
  std::ranges::copy_if(tensors, std::back_inserter(result),
                       [](const at::Tensor& t) { return t.defined() && t.requires_grad(); });
  return result;
}

// A message's tensor as the result of an operation, so that the layer may work in place on it; the leaf, whose gradient goes
// back, stays what it is.
struct DetachedInput : torch::autograd::Function<DetachedInput> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& leaf) { return leaf.detach(); }
  static Tensors backward(torch::autograd::AutogradContext*, Tensors gradients) { return gradients; }
};

Message received(Message message) {
  for (at::Tensor& t : message.tensors)
    if (t.defined() && t.requires_grad() && c10::GradMode::is_enabled()) t = DetachedInput::apply(t);
  return message;
}

}  // namespace

Wires::Wires(const Ranks& ranks, int chunks, at::Device device) {
  const Shape shape{ranks.stages, 1, chunks};
  const auto wire = [&](int chunk, bool ahead) -> std::unique_ptr<Wire> {
    const int stage = ranks.stage(), other = (stage + (ahead ? 1 : ranks.stages - 1)) % ranks.stages;
    if (ahead ? shape.is_last(stage, chunk) : shape.is_first(stage, chunk)) return nullptr;
    const int boundary = shape.part(stage, chunk) - (ahead ? 0 : 1);
    const Line activations{ranks.forwards, 2 * boundary, "activations"};
    const Line gradients{ranks.backwards, 2 * boundary + 1, "gradients"};
    const Peer peer{ranks.peers[other], ranks.name(other * ranks.size + ranks.place())};
    return std::make_unique<Wire>(peer, ahead ? activations : gradients, ahead ? gradients : activations, device);
  };
  for (int chunk = 0; chunk < chunks; ++chunk) {
    before.push_back(wire(chunk, false));
    behind.push_back(wire(chunk, true));
  }
}

std::vector<Wire*> Wires::all() const {
  std::vector<Wire*> wires;
  for (const auto* side : {&behind, &before})
    for (const auto& wire : *side)
      if (wire) wires.push_back(wire.get());
  return wires;
}

Run::Run(Stage& stage, Wires& wires, const Shape& shape, int number, bool trains)
    : stage_(stage),
      wires_(wires),
      shape_(shape),
      number_(number),
      trains_(trains),
      backwards_left_(shape.micro_batches * shape.chunks) {}

void Run::execute(const Table& table) {
  for (const Action& action : table)
    act(action);
  for (const auto& wire : wires_.behind)
    if (wire && !trains_) wire->await_taken(0);
}

void Run::act(const Action& action) {
  const auto [kind, micro, chunk] = action;
  const Cell cell{chunk, micro};
  const int part = shape_.part(number_, chunk);
  switch (kind) {
    case Kind::ReceiveActivations:
      inputs_[cell] = wires_.before[chunk]->receive(number(part - 1, micro));
      if (!trains_) wires_.before[chunk]->acknowledge();
      break;
    case Kind::Forward:
      forward(cell);
      break;
    case Kind::SendActivations:
      if (!trains_) wires_.behind[chunk]->await_taken(kAhead - 1);
      send(*wires_.behind[chunk], taken(made_, cell), part, micro);
      break;
    case Kind::ReceiveGradients:
      gradients_[cell] = wires_.behind[chunk]->receive(number(part, micro));
      break;
    case Kind::Backward:
      backward(cell);
      break;
    case Kind::SendGradients:
      send(*wires_.before[chunk], taken(gradients_, cell), part - 1, micro);
      break;
  }
}

void Run::send(Wire& wire, const Message& message, int part, int micro) {
  wire.send(message, number(part, micro));
  most_under_way = std::max(most_under_way, wire.under_way());
}

void Run::forward(Cell cell) {
  const auto [chunk, micro] = cell;
  const bool first = shape_.is_first(number_, chunk), last = shape_.is_last(number_, chunk);
  Live live;
  Message inputs;
  if (!first) {
    inputs = taken(inputs_, cell);
    live.inputs = trained(inputs.tensors);
  }
  Stage::Made made = stage_.forward(chunk, micro, received(std::move(inputs)));
  if (made.loss.defined()) losses.push_back(made.loss.detach().to(at::kFloat));
  live.outputs = last ? Tensors{made.loss} : trained(made.message.tensors);
  if (!last) made_[cell] = std::move(made.message);
  if (!trains_) return;
  live_[cell] = std::move(live);
  most_live = std::max(most_live, static_cast<int>(live_.size()));
}

void Run::backward(Cell cell) {
  const auto [chunk, micro] = cell;
  const Live live = taken(live_, cell);
  stage_.set_boundary(--backwards_left_ == 0);
  try {
    if (shape_.is_last(number_, chunk)) {
      stage_.backward(live.outputs[0]);
    } else {
      backward_of(live.outputs, taken(gradients_, cell).tensors);
    }
  } catch (const std::exception& error) {
    TESSERA_CHECK(!is_of_freed_graph(error.what()), "pipeline", "stage ", number_, ": the graph of micro-batch ", micro,
                  " was freed before its backward; a layer, a hook or the loss function has called backward() on it. "
                  "The pipeline's engine calls it itself");
    throw;
  }
  if (chunk == 0 && backwards_left_ > 0) stage_.count_micro_batch();
  if (shape_.is_first(number_, chunk)) return;
  Tensors& found = gradients_[cell].tensors;
  for (const at::Tensor& leaf : live.inputs)
    found.push_back(leaf.grad());
}

// The backward of a part that is not the last, from the gradients of the next. They carry the loss scale, which is the same on
// all stages; scale() multiplies by it, so that it is divided out before, in fp32.
void Run::backward_of(const Tensors& outputs, const Tensors& gradients) {
  const bool scales = stage_.scaler().needed();
  Tensors roots, given;
  TESSERA_ASSERT(outputs.size() == gradients.size(), outputs.size(), " outputs, ", gradients.size(), " gradients");
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const bool scale = scales && outputs[i].grad_fn();
    roots.push_back(scale ? stage_.scale(outputs[i]) : outputs[i]);
    given.push_back(scale ? gradients[i].to(at::kFloat) / stage_.scaler().scale() : gradients[i]);
  }
  if (!roots.empty()) stage_.backward(roots, given);
}

}  // namespace tessera::pipeline

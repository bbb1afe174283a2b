#include "tessera/nn/pipeline_run.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"
#include "tessera/nn/freed_graph.h"

namespace tessera::nn {
namespace {

Tensors taken(std::map<std::pair<int, int>, Tensors>& from, std::pair<int, int> place) {
  return std::move(from.extract(place).mapped());
}

Tensors trained(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& t : tensors)
    if (t.defined() && t.requires_grad()) result.push_back(t);
  return result;
}

// A message's tensor as the result of an operation, so that the layer may work in place on it; the leaf, whose gradient goes
// back, stays what it is.
struct Received : torch::autograd::Function<Received> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& leaf) { return leaf.detach(); }
  static Tensors backward(torch::autograd::AutogradContext*, Tensors gradients) { return gradients; }
};

bool is_loss(const Tensors& made) {
  return made.size() == 1 && made[0].defined() && made[0].numel() == 1;
}

Tensors received(Tensors tensors) {
  for (at::Tensor& t : tensors)
    if (t.defined() && t.requires_grad() && c10::GradMode::is_enabled()) t = Received::apply(t);
  return tensors;
}

}  // namespace

PipelineRun::PipelineRun(Pipeline& engine, const pipeline::Shape& shape, std::vector<MicroBatch> batches, bool trains)
    : engine_(engine),
      shape_(shape),
      stage_(engine.stage()),
      batches_(std::move(batches)),
      trains_(trains),
      backwards_left_(shape.micro_batches * shape.chunks) {}

void PipelineRun::execute(const pipeline::Table& table) {
  for (const pipeline::Action& action : table)
    act(action);
}

void PipelineRun::act(const pipeline::Action& action) {
  const auto [kind, micro, chunk] = action;
  const Place place{chunk, micro};
  const int part = shape_.part(stage_, chunk);
  Pipeline::Wires& wires = engine_.wires_;
  switch (kind) {
    case pipeline::Kind::ReceiveActivations:
      inputs_[place] = wires.activations_in[chunk]->receive(number(part - 1, micro));
      break;
    case pipeline::Kind::Forward:
      forward(place);
      break;
    case pipeline::Kind::SendActivations:
      wires.activations_out[chunk]->send(taken(made_, place), number(part, micro));
      break;
    case pipeline::Kind::ReceiveGradients:
      gradients_[place] = wires.gradients_in[chunk]->receive(number(part, micro));
      break;
    case pipeline::Kind::Backward:
      backward(place);
      break;
    case pipeline::Kind::SendGradients:
      wires.gradients_out[chunk]->send(taken(gradients_, place), number(part - 1, micro));
      break;
  }
}

void PipelineRun::forward(Place place) {
  const auto [chunk, micro] = place;
  const bool first = shape_.is_first(stage_, chunk), last = shape_.is_last(stage_, chunk);
  const Tensors inputs = first ? batches_[micro].inputs : taken(inputs_, place);
  Tensors made = engine_.forward(chunk, first ? inputs : received(inputs));
  Live live;
  if (!first) live.inputs = trained(inputs);
  if (last) {
    if (!trains_) outputs.push_back(made);
    if (trains_ || engine_.options_.loss || is_loss(made)) {
      const at::Tensor loss = loss_of(made, micro);
      losses.push_back(loss.detach().to(at::kFloat));
      live.outputs = {loss};
    }
  } else {
    live.outputs = trained(made);
    made_[place] = std::move(made);
  }
  if (!trains_) return;
  live_[place] = std::move(live);
  most_live = std::max(most_live, static_cast<int>(live_.size()));
}

at::Tensor PipelineRun::loss_of(const Tensors& made, int micro) {
  const auto& loss_fn = engine_.options_.loss;
  TESSERA_CHECK_VALUE(loss_fn || made.size() == 1, "pipeline",
                      "without a loss function the last layer returns the loss; it returned ", made.size(), " tensors");
  at::Tensor loss = loss_fn ? loss_fn(made, batches_[micro].labels) : made[0];
  TESSERA_CHECK_VALUE(loss.defined() && loss.numel() == 1, "pipeline", "the loss must be a tensor of one element, ",
                      loss_fn ? "the loss function" : "the last layer", " returned ",
                      loss.defined() ? "sizes " : "none", loss.defined() ? loss.sizes() : at::IntArrayRef());
  return loss;
}

void PipelineRun::backward(Place place) {
  const auto [chunk, micro] = place;
  const Live live = std::move(live_.extract(place).mapped());
  engine_.core().set_gradient_accumulation_boundary(--backwards_left_ == 0);
  try {
    if (shape_.is_last(stage_, chunk)) {
      engine_.core().backward(live.outputs[0]);
    } else {
      backward_of(live.outputs, taken(gradients_, place));
    }
  } catch (const std::exception& error) {
    TESSERA_CHECK(!is_of_freed_graph(error), "pipeline", "stage ", stage_, ": the graph of micro-batch ", micro,
                  " was freed before its backward; a layer or the loss function has called backward() on it. The "
                  "pipeline's engine calls it itself");
    throw;
  }
  if (chunk == 0 && backwards_left_ > 0) engine_.core().step();
  if (shape_.is_first(stage_, chunk)) return;
  Tensors& found = gradients_[place];
  for (const at::Tensor& leaf : live.inputs)
    found.push_back(leaf.grad());
}

// Of a part that is not the last: what the next one has found. It carries the loss scale, which is the same on all stages;
// scale() multiplies by it, so that it is divided out before, in fp32.
void PipelineRun::backward_of(const Tensors& outputs, const Tensors& gradients) {
  engine::Scaling& scaling = engine_.core().scaling();
  const bool scales = scaling.scaler().needed();
  Tensors roots, given;
  TESSERA_ASSERT(outputs.size() == gradients.size(), outputs.size(), " outputs, ", gradients.size(), " gradients");
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const bool scale = scales && outputs[i].grad_fn();
    roots.push_back(scale ? scaling.scale(outputs[i]) : outputs[i]);
    given.push_back(scale ? gradients[i].to(at::kFloat) / scaling.scaler().scale() : gradients[i]);
  }
  if (!roots.empty()) torch::autograd::backward(roots, given);
}

}  // namespace tessera::nn

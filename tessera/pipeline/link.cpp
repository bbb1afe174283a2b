#include "tessera/pipeline/link.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <bit>

#include "tessera/base/error.h"
#include "tessera/parallel/held.h"
#include "tessera/pipeline/freed_graph.h"
#include "tessera/pipeline/link_message.h"

namespace tessera::pipeline {
namespace {

constexpr int64_t kUntaken = 8;  // messages without a graph that a taker may have to take

template <class V>
std::vector<std::string> names_of(const std::map<Sample, V>& samples) {
  std::vector<std::string> names;
  for (const auto& [sample, value] : samples)
    names.push_back(sample.text);
  return names;
}

}  // namespace

// ---------------------------------------------------------------- the source

LinkSender::LinkSender(LinkRanks ranks, LinkEngine engine) : LinkEnd(std::move(ranks), std::move(engine), true) {
  const Line sizes{ranks_.p2p, ranks_.tag + 2, "sizes"};
  for (int part = 0; part < ranks_.source.parts(); ++part) {
    if (part == part_) continue;
    const int place = ranks_.source.holder(part, ranks_.place);
    const Peer peer{rank_of(true, place), name_of(true, place)};
    beside_[place] = std::make_unique<Wire>(peer, sizes, sizes, at::kCPU);
  }
}

// The headers of all parts of the source.
std::vector<LinkEnd::Header> LinkSender::exchange(const Header& mine) {
  std::vector<Header> headers(ranks_.source.parts(), mine);
  for (const auto& [place, wire] : beside_)
    wire->send({{at::tensor(mine, at::kLong)}}, number_);
  const Sample sample = sample_of(mine);
  for (const auto& [place, wire] : beside_) {
    const std::string peer = name_of(true, place);
    Header& header = headers[ranks_.source.part(place)];
    header = waiting(peer, c10::str("its part of sample ", sample),
                     [&, &wire = *wire] { return numbers_of(wire.receive(number_).tensors[0]); });
    TESSERA_CHECK(sample_of(header) == sample, "hybrid", me_, " sends sample ", sample, ", but ", peer,
                  " sends sample ", sample_of(header));
  }
  return headers;
}

void LinkSender::send(const Tensors& outputs, const Sample& sample, const std::optional<Sizes>& samples,
                      const std::string& note) {
  TESSERA_CHECK(!open_.contains(sample), "hybrid", me_, ": sample ", sample,
                " is on its way already; call backward() for it first");
  Sent sent = announce(outputs, sample, samples, note);
  if (!sent.trained.empty()) open_.emplace(sample, std::move(sent));
}

LinkSender::Sent LinkSender::announce(const Tensors& outputs, const Sample& sample, const std::optional<Sizes>& samples,
                                      const std::string& note) {
  std::vector<Outputs> incoming;
  Header mine = header_of(number_, sample);
  add_outputs(mine, outputs, samples);
  for (const Header& header : exchange(mine))
    incoming.push_back(outputs_of(header));
  const LinkTable table = table_of(incoming, ranks_, me_);
  const bool trained =
      std::any_of(outputs.begin(), outputs.end(), [](const at::Tensor& t) { return t.requires_grad(); });
  Pieces copies(ranks_.p2p);
  for (const int taker : takers()) {
    LinkMessage message{mine, {}, note};
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Box& own = table.held[i][part_];
      if (const auto box = route(table.held[i], part_, table.wanted[i][ranks_.target.part(taker)]))
        message.pieces.push_back(is_own(taker) ? inside(outputs[i].detach(), *box, own)
                                               : copies.of(outputs[i], *box, own));
    }
    put(taker, message);
    if (!trained) keep_behind(taker, kUntaken);
  }
  Sent sent{number_++, {}, {}, {}, {}};
  ++since_;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    sent.trained.push_back(outputs[i]);
    sent.devices.push_back(outputs[i].device());
    sent.held.push_back(table.held[i]);
    sent.wanted.push_back(table.wanted[i]);
  }
  return sent;
}

LinkEnd::LinkMessage LinkSender::gradient(int giver, int64_t number, const Sample& sample) {
  if (auto found = early_.extract(std::pair(giver, number))) return std::move(found.mapped());
  while (true) {
    LinkMessage message = read(giver, c10::str("the gradient of sample ", sample));
    if (message.header[1] == number) return message;
    early_.emplace(std::pair(giver, message.header[1]), std::move(message));
  }
}

std::pair<Tensors, Tensors> LinkSender::gradients(const Sample& sample) {
  TESSERA_CHECK(open_.contains(sample), "hybrid", me_, ": there is no graph of sample ", sample,
                " (it was not sent, sent without gradients, or its backward has run); waiting for gradients are [",
                c10::Join(", ", names_of(open_)), "]");
  const Sent sent = std::move(open_.extract(sample).mapped());
  const Tensors found = gradients_of(sent, sample);  // the roots carry the loss scale
  std::pair<Tensors, Tensors> pairs;
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].defined()) continue;
    pairs.first.push_back(engine_.scale ? engine_.scale(sent.trained[i]) : sent.trained[i]);
    pairs.second.push_back(found[i]);
  }
  return pairs;
}

void LinkSender::check_not_freed(const Sample& sample, const std::string& error) const {
  TESSERA_CHECK(!is_of_freed_graph(error), "hybrid", me_, ": the graph of sample ", sample,
                " was freed before its gradient came: another backward went through it; let that keep the graph "
                "(retain_graph)");
}

void LinkSender::backward(const Sample& sample) {
  const auto [roots, found] = gradients(sample);
  if (roots.empty()) return;
  try {
    torch::autograd::backward(roots, found);
  } catch (const std::exception& error) {
    check_not_freed(sample, error.what());
    throw;
  }
}

Tensors LinkSender::gradients_of(const Sent& sent, const Sample& sample) {
  Tensors found(sent.held.size());  // of tensors with a graph
  double given_scale = 1;
  for (const int giver : givers()) {
    const LinkMessage message = gradient(giver, sent.number, sample);
    const int from = ranks_.target.part(giver);
    const size_t flags = body_of(message.header);
    given_scale = std::bit_cast<double>(message.header.at(flags + found.size()));
    auto piece = message.pieces.begin();
    for (size_t i = 0; i < found.size(); ++i) {
      if (message.header.at(flags + i) == 0) continue;
      const Box& mine = sent.held[i][part_];
      if (const auto box = route(sent.wanted[i], from, mine)) join(found[i], *piece++, *box, mine);
    }
  }
  // Engines average over their ranks: the factor makes it the average of one process with one model.
  const double factor = static_cast<double>(ranks_.source.parts()) / ranks_.target.parts() / given_scale;
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].defined()) continue;
    found[i] = found[i].to(sent.devices[i]);
    if (factor != 1) found[i] = found[i] * factor;
  }
  return found;
}

void LinkSender::step() {
  end_step(names_of(open_), "backward");
}

// ---------------------------------------------------------------- the target

LinkReceiver::LinkReceiver(LinkRanks ranks, LinkEngine engine) : LinkEnd(std::move(ranks), std::move(engine), false) {}

Message LinkReceiver::receive_message(const Sample& sample) {
  TESSERA_CHECK(!open_.contains(sample), "hybrid", me_, ": sample ", sample,
                " was received already; call give_back() for it first");
  auto [message, received] = take_in(sample);
  if (!received.leaves.empty()) open_.emplace(sample, std::move(received));
  return std::move(message);
}

std::pair<Message, LinkReceiver::Received> LinkReceiver::take_in(const Sample& sample) {
  std::vector<LinkMessage> messages;
  std::vector<Outputs> incoming;
  for (const int giver : givers()) {
    messages.push_back(read(giver, c10::str("sample ", sample)));
    const Sample sent = sample_of(messages.back().header);
    TESSERA_CHECK(sent == sample, "hybrid", me_, " asks for sample ", sample, ", but the next message of ",
                  name_of(true, giver), " is of sample ", sent);
    incoming.push_back(outputs_of(messages.back().header));
  }
  const LinkTable table = table_of(incoming, ranks_, me_);
  Tensors tensors(table.held.size());
  for (int from = 0; from < ranks_.source.parts(); ++from) {
    auto piece = messages[from].pieces.begin();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Box& mine = table.wanted[i][part_];
      if (const auto box = route(table.held[i], from, mine)) join(tensors[i], *piece++, *box, mine);
    }
  }
  Received received{number_++, {}, {}, {}};
  ++since_;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined())  // nobody has anything of the tensor
      tensors[i] =
          at::empty(sizes_of(table.wanted[i][part_]), at::TensorOptions(incoming[0].dtypes[i]).device(engine_.device));
    if (!incoming[0].trained[i]) continue;
    received.leaves.push_back(tensors[i].requires_grad_());
    received.held.push_back(table.held[i]);
    received.wanted.push_back(table.wanted[i]);
  }
  return {{std::move(tensors), std::move(messages[0].note)}, std::move(received)};
}

void LinkReceiver::give_back(const Sample& sample, const std::optional<Tensors>& gradients) {
  const auto found = open_.find(sample);
  TESSERA_CHECK(found != open_.end(), "hybrid", me_, ": sample ", sample,
                " has no gradient to give back (it was not received, came without a graph, or its gradient has gone); "
                "those that have: [",
                c10::Join(", ", names_of(open_)), "]");
  const Received& received = found->second;
  const size_t count = received.leaves.size();
  TESSERA_CHECK_VALUE(!gradients || gradients->size() == count, "hybrid", me_, ": give_back() got ",
                      gradients.value_or(Tensors()).size(), " gradients for ", count, " tensors that require some");
  Tensors found_here(count);
  for (size_t i = 0; i < count; ++i) {
    at::Tensor gradient = gradients ? (*gradients)[i] : received.leaves[i].grad();
    if (!gradient.defined()) continue;
    TESSERA_CHECK_VALUE(gradient.sizes() == received.leaves[i].sizes(), "hybrid", me_, ": a gradient has the sizes ",
                        gradient.sizes(), ", its tensor ", received.leaves[i].sizes());
    found_here[i] = gradient.detach().to(received.leaves[i].scalar_type());
  }
  TESSERA_CHECK(std::any_of(found_here.begin(), found_here.end(), [](const at::Tensor& t) { return t.defined(); }),
                "hybrid", me_, ": no gradient has reached sample ", sample,
                "; call give_back() after the backward of its loss");
  send_back(received, sample, found_here);
  open_.erase(found);
}

void LinkReceiver::send_back(const Received& received, const Sample& sample, const Tensors& gradients) {
  const size_t count = gradients.size();
  Header header = header_of(received.number, sample);
  for (const at::Tensor& gradient : gradients)
    header.push_back(gradient.defined() ? 1 : 0);
  header.push_back(std::bit_cast<int64_t>(gradient_scale()));
  Pieces copies(ranks_.p2p);
  for (const int taker : takers()) {
    LinkMessage message{header, {}};
    for (size_t i = 0; i < count; ++i) {
      const Box& own = received.wanted[i][part_];
      const auto box = route(received.wanted[i], part_, received.held[i][ranks_.source.part(taker)]);
      if (!box || !gradients[i].defined()) continue;
      message.pieces.push_back(is_own(taker) ? inside(gradients[i].detach(), *box, own)
                                             : copies.of(gradients[i], *box, own));
    }
    put(taker, message);
  }
}

void LinkReceiver::step() {
  end_step(names_of(open_), "give_back");
}

// ---------------------------------------------------------------- both in one process

struct HandOver {
  LinkSender* sender;  // null: a rank of the target alone
  const Tensors& outputs;
  LinkReceiver& receiver;
  const Sample& sample;
  const std::optional<Sizes>& samples;
  std::string& note;  // sent, then what has come

  // What a forward leaves for its backward.
  struct Kept {
    std::weak_ptr<LinkEnd> sender, receiver;
    bool sends;
    Sample sample;
    LinkSender::Sent sent;
    LinkReceiver::Received received;
    std::vector<bool> trained;
  };

  struct Function : torch::autograd::Function<Function> {
    // `roots`: the outputs times the loss scale, to which gradients go back.
    static Tensors forward(torch::autograd::AutogradContext* ctx, at::TensorList /*roots*/, const HandOver& call) {
      Kept kept{{}, call.receiver.self_, call.sender != nullptr, call.sample, {}, {}, {}};
      if (call.sender != nullptr) {
        call.sender->pair_with(call.receiver), call.receiver.pair_with(*call.sender);
        kept.sender = call.sender->self_;
        kept.sent = call.sender->announce(call.outputs, call.sample, call.samples, call.note);
      }
      auto [message, received] = call.receiver.take_in(call.sample);
      call.note = std::move(message.note);
      Tensors tensors = std::move(message.tensors);
      kept.sent.trained.clear();
      received.leaves.clear();
      kept.received = std::move(received);
      Tensors untrained;
      for (size_t i = 0; i < tensors.size(); ++i) {
        kept.trained.push_back(tensors[i].requires_grad());
        tensors[i] = tensors[i].detach();
        if (!kept.trained[i]) untrained.push_back(tensors[i]);
      }
      ctx->mark_non_differentiable(untrained);
      ctx->set_materialize_grads(false);
      parallel::hold(ctx, std::move(kept));
      return tensors;
    }

    static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& gradients) {
      const auto& kept = parallel::held<Kept>(ctx);
      auto& receiver = LinkReceiver::there<LinkReceiver>(kept.receiver);
      auto* const sender = kept.sends ? &LinkSender::there<LinkSender>(kept.sender) : nullptr;
      Tensors given;
      for (size_t i = 0; i < gradients.size(); ++i)
        if (kept.trained[i]) given.push_back(gradients[i]);
      receiver.send_back(kept.received, kept.sample, given);
      if (sender == nullptr) return {at::Tensor(), at::Tensor()};
      const Tensors found = sender->gradients_of(kept.sent, kept.sample);
      Tensors results;
      auto next = found.begin();
      for (const bool trained : kept.trained)
        results.push_back(trained ? *next++ : at::Tensor());
      results.emplace_back();
      return results;
    }
  };
};

Tensors hand_over(LinkSender& sender, LinkReceiver& receiver, const Tensors& outputs, const Sample& sample,
                  const std::optional<Sizes>& samples, std::string note) {
  Tensors roots = outputs;
  for (at::Tensor& root : roots)
    if (root.requires_grad() && sender.engine_.scale) root = sender.engine_.scale(root);
  return HandOver::Function::apply(at::TensorList(roots), HandOver{&sender, outputs, receiver, sample, samples, note});
}

Message hand_over(LinkReceiver& receiver, const Sample& sample) {
  const Tensors starts{at::empty({0}).requires_grad_()};  // what comes has a graph
  std::string note;
  Tensors tensors =
      HandOver::Function::apply(at::TensorList(starts), HandOver{nullptr, {}, receiver, sample, {}, note});
  return {std::move(tensors), std::move(note)};
}

}  // namespace tessera::pipeline

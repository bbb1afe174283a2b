#include "tessera/nn/link.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/parallel/held.h"
#include "tessera/pipeline/freed_graph.h"

namespace tessera::nn {
namespace {

using pipeline::Box;
using pipeline::Sizes;

// A header is the first tensor of every message; its first number says what it is.
enum Kind : int64_t { kTensors, kEndOfStep };
// Of kTensors: kind, number of the message, sample; of kEndOfStep: kind, step, messages in it.
constexpr size_t kHead = 3;

constexpr int kFirstTag = 1 << 16;  // clear of a pipeline's
constexpr int kTags = 3;            // of a link: outputs, gradients, headers among the ranks of the source

// What a rank of the source says of its outputs.
struct Outputs {
  std::optional<Sizes> samples;
  std::vector<at::ScalarType> dtypes;
  std::vector<bool> trained;
  std::vector<Sizes> shapes;
};

std::vector<int64_t> header_of(int64_t number, int64_t sample, const Tensors& outputs,
                               const std::optional<Sizes>& samples) {
  std::vector<int64_t> header{kTensors, number, sample, samples ? static_cast<int64_t>(samples->size()) : -1};
  if (samples) header.insert(header.end(), samples->begin(), samples->end());
  for (const at::Tensor& t : outputs) {
    header.insert(header.end(), {static_cast<int64_t>(t.scalar_type()), t.requires_grad() ? 1 : 0, t.dim()});
    header.insert(header.end(), t.sizes().begin(), t.sizes().end());
  }
  return header;
}

Outputs outputs_of(const std::vector<int64_t>& header) {
  Outputs outputs;
  auto next = header.begin() + kHead;
  const auto list = [&](int64_t count) {
    Sizes values(next, next + count);
    next += count;
    return values;
  };
  if (const int64_t count = *next++; count >= 0) outputs.samples = list(count);
  while (next != header.end()) {
    outputs.dtypes.push_back(static_cast<at::ScalarType>(*next++));
    outputs.trained.push_back(*next++ != 0);
    outputs.shapes.push_back(list(*next++));
  }
  return outputs;
}

// The boxes of every tensor, on both sides.
struct Table {
  std::vector<std::vector<Box>> held, wanted;
};

Table table_of(const std::vector<Outputs>& parts, const pipeline::Layout& source, const pipeline::Layout& target,
               const pipeline::Dims& dims, const std::string& where) {
  std::optional<Sizes> samples = Sizes();
  for (size_t part = 0; part < parts.size(); ++part) {
    TESSERA_CHECK_VALUE(parts[part].dtypes == parts[0].dtypes && parts[part].trained == parts[0].trained, "hybrid",
                        where, ": ranks 0 and ", part * source.replicas, " sent other tensors");
    if (part % source.sequence != 0) continue;
    if (!parts[part].samples) samples.reset();
    if (samples) samples->insert(samples->end(), parts[part].samples->begin(), parts[part].samples->end());
  }
  Table table;
  for (size_t i = 0; i < parts[0].shapes.size(); ++i) {
    std::vector<Sizes> shapes;
    for (const Outputs& part : parts)
      shapes.push_back(part.shapes[i]);
    auto whole = pipeline::whole_of(source, dims, shapes, where);
    table.wanted.push_back(pipeline::wanted_of(target, dims, whole.sizes, samples, where));
    table.held.push_back(std::move(whole.held));
  }
  return table;
}

Sizes sizes_of(const Box& box) {
  Sizes sizes;
  for (const auto& [begin, end] : box)
    sizes.push_back(end - begin);
  return sizes;
}

// `box` of a tensor that holds `outer`.
at::Tensor inside(at::Tensor tensor, const Box& box, const Box& outer) {
  for (size_t d = 0; d < box.size(); ++d)
    tensor = tensor.narrow(static_cast<int64_t>(d), box[d].first - outer[d].first, box[d].second - box[d].first);
  return tensor;
}

// Puts a piece into `whole`, which holds `outer`; where it is all of it, without a copy.
void join(at::Tensor& whole, const at::Tensor& piece, const Box& box, const Box& outer) {
  if (box == outer) {
    whole = piece;
    return;
  }
  if (!whole.defined()) whole = at::zeros(sizes_of(outer), piece.options());
  inside(whole, box, outer).copy_(piece);
}

}  // namespace

// ---------------------------------------------------------------- both ends

LinkEnd::LinkEnd(const Link& link, const comm::Parts& parts, engine::Engine* engine, bool sends)
    : link_(link),
      parts_(parts),
      engine_(engine),
      sends_(sends),
      source_(pipeline::Layout::of(parts.shapes.at(link.source))),
      target_(pipeline::Layout::of(parts.shapes.at(link.target))),
      dims_{link.batch_dim, link.sequence_dim},
      me_(name_of(sends, parts.place())) {
  const int mine = sends ? link.source : link.target, count = static_cast<int>(parts.shapes.size());
  TESSERA_CHECK_VALUE(link.source != link.target && parts.part == mine, "hybrid", "this rank is of part ", parts.part,
                      "; the ", sends ? "source" : "target", " of the link is part ", mine);
  for (const auto* layout : {&source_, &target_})
    TESSERA_CHECK_VALUE(layout->sequence == 1 || link.sequence_dim, "hybrid", link.sides[layout == &source_ ? 0 : 1],
                        ": ", layout->sequence, " ranks share a sequence; say sequence_dim, its dim");
  if (engine != nullptr) {
    for (const comm::Axis axis : comm::kAxes)
      TESSERA_CHECK_VALUE(engine->mesh().size(axis) == parts.shapes[mine].size(axis), "hybrid", me_,
                          ": its engine has ", engine->mesh().size(axis), " ranks along '", comm::axis_name(axis),
                          "', its part ", parts.shapes[mine].size(axis));
  }
  const int first = kFirstTag + kTags * ((link.number * count + link.source) * count + link.target);
  const at::Device device =
      engine != nullptr && !engine->params().empty() ? engine->params().front().tensor.device() : at::Device(at::kCPU);
  std::vector<int> places = takers();
  for (const int place : givers())
    if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(place);
  for (const int place : places) {
    if (is_own(place)) continue;
    const pipeline::Line outputs{parts.p2p, first, "outputs"}, gradients{parts.p2p, first + 1, "gradients"};
    const pipeline::Peer peer{parts.rank_of(sends ? link.target : link.source, place), name_of(!sends, place)};
    wires_[place] =
        std::make_unique<pipeline::Wire>(peer, sends ? outputs : gradients, sends ? gradients : outputs, device);
  }
}

bool LinkEnd::is_own(int place) const {
  return parts_.rank_of(sends_ ? link_.target : link_.source, place) == parts_.everyone->rank();
}

template <class End>
End& LinkEnd::there(const std::weak_ptr<LinkEnd>& end) {
  const std::shared_ptr<LinkEnd> found = end.lock();
  TESSERA_CHECK(found != nullptr, "hybrid", "an end of hand_over() is gone; keep both until the last backward");
  return static_cast<End&>(*found);
}

void LinkEnd::pair_with(const LinkEnd& other) {
  TESSERA_CHECK(!joined_ || joined_->lock() == other.self_, "hybrid", me_,
                ": hand_over() has joined it to another end");
  TESSERA_CHECK_VALUE(parts_.overlaid && other.parts_.overlaid && parts_.everyone == other.parts_.everyone, "hybrid",
                      me_,
                      ": hand_over() takes the two ends of a process that is of both sides (comm::overlaid parts)");
  joined_ = other.self_;
}

std::string LinkEnd::name_of(bool source, int place) const {
  return c10::str("rank ", place, " of ", link_.sides[source ? 0 : 1]);
}

std::vector<int> LinkEnd::takers() const {
  const pipeline::Layout &mine = sends_ ? source_ : target_, &other = sends_ ? target_ : source_;
  std::vector<int> places;
  for (int place = 0; place < other.ranks(); ++place)
    if (place % mine.replicas == parts_.place() % mine.replicas) places.push_back(place);
  return places;
}

std::vector<int> LinkEnd::givers() const {
  const pipeline::Layout& other = sends_ ? target_ : source_;
  std::vector<int> places;
  for (int part = 0; part < other.parts(); ++part)
    places.push_back(other.holder(part, parts_.place()));
  return places;
}

void LinkEnd::put(int taker, const Header& header, const Tensors& pieces) {
  Tensors tensors{at::tensor(header, at::kLong)};
  tensors.insert(tensors.end(), pieces.begin(), pieces.end());
  if (is_own(taker)) {
    TESSERA_CHECK(joined_, "hybrid", me_, ": a process that is of both sides hands over by hand_over()");
    LinkEnd& other = there<LinkEnd>(*joined_);
    Tensors copies;  // the two engines may change theirs
    for (const at::Tensor& piece : pieces)
      copies.push_back(piece.clone(at::MemoryFormat::Contiguous));
    other.from_joined_.push_back({header, std::move(copies)});
    return;
  }
  wires_.at(taker)->send({tensors}, sent_[taker]++);
}

LinkEnd::Message LinkEnd::take(int giver) {
  if (is_own(giver)) {
    TESSERA_CHECK(!from_joined_.empty(), "hybrid", me_, ": a process that is of both sides hands over by hand_over()");
    Message message = std::move(from_joined_.front());
    from_joined_.pop_front();
    return message;
  }
  const Tensors tensors = wires_.at(giver)->receive(read_[giver]++).tensors;
  const at::Tensor said = tensors[0].cpu();
  const auto* header = said.const_data_ptr<int64_t>();
  return {{header, header + said.numel()}, {tensors.begin() + 1, tensors.end()}};
}

LinkEnd::Message LinkEnd::read(int giver, const std::string& what) {
  Message message = take(giver);
  TESSERA_CHECK(message.header[0] == kTensors, "hybrid", me_, " waits for ", what, ", but ", name_of(!sends_, giver),
                " has ended step ", message.header[1], " after ", message.header[2], " micro-batches");
  return message;
}

void LinkEnd::end_step(const std::vector<int64_t>& left, const char* call) {
  TESSERA_CHECK(!joined_, "hybrid", me_, ": ends of hand_over() have no step(); leave it out");
  TESSERA_CHECK(left.empty(), "hybrid", me_, ": step ", step_, " ends, but the gradients of samples ",
                at::IntArrayRef(left), " are still out; call ", call, "() for each before step()");
  for (const int taker : takers())
    put(taker, {kEndOfStep, step_, since_}, {});
  for (const int giver : givers()) {
    const Header header = take(giver).header;
    TESSERA_CHECK(header[0] == kEndOfStep && header[2] == since_, "hybrid", name_of(!sends_, giver), " had ",
                  header[0] == kEndOfStep ? std::to_string(header[2]) : "more", " micro-batches in step ", step_, ", ",
                  me_, " had ", since_);
  }
  parts_.p2p->flush();
  ++step_;
  since_ = 0;
}

void LinkEnd::abort(const std::string& reason) {
  for (const auto& [place, wire] : wires_) {
    try {
      wire->send_failure(c10::str("[hybrid] ", me_, ": ", reason));
    } catch (const c10::DistBackendError&) {
      // It is lost: nobody waits there.
    }
  }
}

// ---------------------------------------------------------------- the source

LinkSender::LinkSender(const Link& link, const comm::Parts& parts, engine::Engine* engine)
    : LinkEnd(link, parts, engine, true), beside_(source_.parts()) {
  const int count = static_cast<int>(parts.shapes.size()), mine = source_.part(parts.place());
  const int tag = kFirstTag + kTags * ((link.number * count + link.source) * count + link.target) + 2;
  for (int part = 0; part < source_.parts(); ++part) {
    if (part == mine) continue;
    const int place = part * source_.replicas + parts.place() % source_.replicas;
    const pipeline::Peer peer{parts.rank_of(link.source, place), name_of(true, place)};
    const pipeline::Line sizes{parts.p2p, tag, "sizes"};
    beside_[part] = std::make_unique<pipeline::Wire>(peer, sizes, sizes, at::kCPU);
  }
}

// The headers of all parts of the source.
std::vector<LinkEnd::Header> LinkSender::exchange(const Header& mine) {
  std::vector<Header> headers(beside_.size(), mine);
  for (const auto& wire : beside_)
    if (wire) wire->send({{at::tensor(mine, at::kLong)}}, number_);
  for (size_t part = 0; part < headers.size(); ++part) {
    if (!beside_[part]) continue;
    const at::Tensor header = beside_[part]->receive(number_).tensors[0];
    headers[part].assign(header.const_data_ptr<int64_t>(), header.const_data_ptr<int64_t>() + header.numel());
    TESSERA_CHECK(headers[part][2] == mine[2], "hybrid", me_, " sends sample ", mine[2], ", but ",
                  name_of(true, static_cast<int>(part) * source_.replicas), " sends sample ", headers[part][2]);
  }
  return headers;
}

void LinkSender::send(const Tensors& outputs, int64_t sample, const std::optional<Sizes>& samples) {
  TESSERA_CHECK(!open_.contains(sample), "hybrid", me_, ": sample ", sample,
                " is on its way already; call backward() for it first");
  Sent sent = announce(outputs, sample, samples);
  if (!sent.trained.empty()) open_.emplace(sample, std::move(sent));
}

LinkSender::Sent LinkSender::announce(const Tensors& outputs, int64_t sample, const std::optional<Sizes>& samples) {
  std::vector<Outputs> said;
  const Header mine = header_of(number_, sample, outputs, samples);
  for (const Header& header : exchange(mine))
    said.push_back(outputs_of(header));
  const Table table = table_of(said, source_, target_, dims_, me_);
  const int part = source_.part(parts_.place());
  for (const int taker : takers()) {
    Tensors pieces;
    for (size_t i = 0; i < outputs.size(); ++i)
      if (const auto box = pipeline::route(table.held[i], part, table.wanted[i][target_.part(taker)]))
        pieces.push_back(inside(outputs[i].detach(), *box, table.held[i][part]));
    put(taker, mine, pieces);
  }
  Sent sent{number_++, {}, {}, {}};
  ++since_;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    sent.trained.push_back(outputs[i]);
    sent.held.push_back(table.held[i]);
    sent.wanted.push_back(table.wanted[i]);
  }
  return sent;
}

LinkEnd::Message LinkSender::gradient(int giver, int64_t number, int64_t sample) {
  if (auto found = early_.extract(std::pair(giver, number))) return std::move(found.mapped());
  while (true) {
    Message message = read(giver, c10::str("the gradient of sample ", sample));
    if (message.header[1] == number) return message;
    early_.emplace(std::pair(giver, message.header[1]), std::move(message));
  }
}

void LinkSender::backward(int64_t sample) {
  TESSERA_CHECK(open_.contains(sample), "hybrid", me_, ": there is no graph of sample ", sample,
                " (it was not sent, sent without gradients, or its backward has run)");
  const Sent sent = std::move(open_.extract(sample).mapped());
  const Tensors found = gradients_of(sent, sample);
  Tensors roots, gradients;
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].defined()) continue;
    roots.push_back(engine_ != nullptr ? engine_->scaling().scale(sent.trained[i]) : sent.trained[i]);
    gradients.push_back(found[i]);
  }
  if (roots.empty()) return;
  try {
    torch::autograd::backward(roots, gradients);
  } catch (const std::exception& error) {
    TESSERA_CHECK(!pipeline::is_of_freed_graph(error), "hybrid", me_, ": the graph of sample ", sample,
                  " was freed before its gradient came: another backward went through it; let that keep the graph");
    throw;
  }
}

Tensors LinkSender::gradients_of(const Sent& sent, int64_t sample) {
  const int part = source_.part(parts_.place());
  Tensors found(sent.held.size());  // of those with a graph
  for (const int giver : givers()) {
    const Message message = gradient(giver, sent.number, sample);
    const int from = target_.part(giver);
    auto piece = message.pieces.begin();
    for (size_t i = 0; i < found.size(); ++i) {
      if (message.header[kHead + i] == 0) continue;
      const Box& mine = sent.held[i][part];
      if (const auto box = pipeline::route(sent.wanted[i], from, mine)) join(found[i], *piece++, *box, mine);
    }
  }
  // Engines average over their ranks: as one process with one model would.
  const double factor = static_cast<double>(source_.parts()) / target_.parts();
  for (at::Tensor& gradient : found)
    if (gradient.defined() && factor != 1) gradient = gradient * factor;
  return found;
}

void LinkSender::step() {
  std::vector<int64_t> left;
  for (const auto& [sample, sent] : open_)
    left.push_back(sample);
  end_step(left, "backward");
}

// ---------------------------------------------------------------- the target

LinkReceiver::LinkReceiver(const Link& link, const comm::Parts& parts, engine::Engine* engine)
    : LinkEnd(link, parts, engine, false) {}

Tensors LinkReceiver::receive(int64_t sample) {
  TESSERA_CHECK(!open_.contains(sample), "hybrid", me_, ": sample ", sample,
                " was received already; call give_back() for it first");
  auto [tensors, received] = take_in(sample);
  if (!received.leaves.empty()) open_.emplace(sample, std::move(received));
  return std::move(tensors);
}

std::pair<Tensors, LinkReceiver::Received> LinkReceiver::take_in(int64_t sample) {
  std::vector<Message> messages;
  std::vector<Outputs> said;
  for (const int giver : givers()) {
    messages.push_back(read(giver, c10::str("sample ", sample)));
    TESSERA_CHECK(messages.back().header[2] == sample, "hybrid", me_, " asks for sample ", sample,
                  ", but the next message of ", name_of(true, giver), " is of sample ", messages.back().header[2]);
    said.push_back(outputs_of(messages.back().header));
  }
  const Table table = table_of(said, source_, target_, dims_, me_);
  const int part = target_.part(parts_.place());
  Tensors tensors(table.held.size());
  for (int from = 0; from < source_.parts(); ++from) {
    auto piece = messages[from].pieces.begin();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Box& mine = table.wanted[i][part];
      if (const auto box = pipeline::route(table.held[i], from, mine)) join(tensors[i], *piece++, *box, mine);
    }
  }
  Received received{number_++, {}, {}, {}};
  ++since_;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined())  // nobody has anything of it
      tensors[i] = at::empty(sizes_of(table.wanted[i][part]), at::TensorOptions(said[0].dtypes[i]));
    if (!said[0].trained[i]) continue;
    received.leaves.push_back(tensors[i].requires_grad_());
    received.held.push_back(table.held[i]);
    received.wanted.push_back(table.wanted[i]);
  }
  return {std::move(tensors), std::move(received)};
}

void LinkReceiver::give_back(int64_t sample, const std::optional<Tensors>& gradients) {
  const auto found = open_.find(sample);
  TESSERA_CHECK(found != open_.end(), "hybrid", me_, ": sample ", sample,
                " has no gradient to give back (it was not received, came without a graph, or its gradient has gone)");
  const Received& received = found->second;
  const size_t count = received.leaves.size();
  TESSERA_CHECK_VALUE(!gradients || gradients->size() == count, "hybrid", me_, ": give_back() got ",
                      gradients.value_or(Tensors()).size(), " gradients for ", count, " tensors that require some");
  const bool scaled = engine_ != nullptr && engine_->scaling().scaler().needed();
  Tensors found_here(count);
  for (size_t i = 0; i < count; ++i) {
    at::Tensor gradient = gradients ? (*gradients)[i] : received.leaves[i].grad();
    if (!gradient.defined()) continue;
    TESSERA_CHECK_VALUE(gradient.sizes() == received.leaves[i].sizes(), "hybrid", me_, ": a gradient has the sizes ",
                        gradient.sizes(), ", its tensor ", received.leaves[i].sizes());
    if (scaled) gradient = gradient / engine_->scaling().gradient_scale();
    found_here[i] = gradient.detach().to(received.leaves[i].scalar_type());
  }
  TESSERA_CHECK(std::any_of(found_here.begin(), found_here.end(), [](const at::Tensor& t) { return t.defined(); }),
                "hybrid", me_, ": no gradient has reached sample ", sample,
                "; call give_back() after the backward of its loss");
  send_back(received, sample, found_here);
  open_.erase(found);
}

void LinkReceiver::send_back(const Received& received, int64_t sample, const Tensors& gradients) {
  const size_t count = gradients.size();
  Header header{kTensors, received.number, sample};
  for (const at::Tensor& gradient : gradients)
    header.push_back(gradient.defined() ? 1 : 0);
  const int part = target_.part(parts_.place());
  for (const int taker : takers()) {
    Tensors pieces;
    for (size_t i = 0; i < count; ++i) {
      const auto box = pipeline::route(received.wanted[i], part, received.held[i][source_.part(taker)]);
      if (box && gradients[i].defined()) pieces.push_back(inside(gradients[i], *box, received.wanted[i][part]));
    }
    put(taker, header, pieces);
  }
}

void LinkReceiver::step() {
  std::vector<int64_t> left;
  for (const auto& [sample, received] : open_)
    left.push_back(sample);
  end_step(left, "give_back");
}

// ---------------------------------------------------------------- both in one process

struct HandOver {
  LinkSender& sender;
  LinkReceiver& receiver;
  int64_t sample;
  const std::optional<Sizes>& samples;

  // What a forward leaves for its backward.
  struct Kept {
    std::weak_ptr<LinkEnd> sender, receiver;
    int64_t sample;
    LinkSender::Sent sent;
    LinkReceiver::Received received;
    std::vector<bool> trained;
  };

  struct Function : torch::autograd::Function<Function> {
    static Tensors forward(torch::autograd::AutogradContext* ctx, at::TensorList outputs, const HandOver& call) {
      call.sender.pair_with(call.receiver), call.receiver.pair_with(call.sender);
      Kept kept{call.sender.self_, call.receiver.self_, call.sample, {}, {}, {}};
      kept.sent = call.sender.announce(outputs.vec(), call.sample, call.samples);
      auto [tensors, received] = call.receiver.take_in(call.sample);
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
      return std::move(tensors);
    }

    static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& gradients) {
      const auto& kept = parallel::held<Kept>(ctx);
      auto& receiver = LinkReceiver::there<LinkReceiver>(kept.receiver);
      auto& sender = LinkSender::there<LinkSender>(kept.sender);
      Tensors given;
      for (size_t i = 0; i < gradients.size(); ++i)
        if (kept.trained[i]) given.push_back(gradients[i]);
      receiver.send_back(kept.received, kept.sample, given);
      const Tensors found = sender.gradients_of(kept.sent, kept.sample);
      Tensors results;
      auto next = found.begin();
      for (const bool trained : kept.trained)
        results.push_back(trained ? *next++ : at::Tensor());
      results.emplace_back();
      return results;
    }
  };
};

Tensors hand_over(LinkSender& sender, LinkReceiver& receiver, const Tensors& outputs, int64_t sample,
                  const std::optional<Sizes>& samples) {
  return HandOver::Function::apply(at::TensorList(outputs), HandOver{sender, receiver, sample, samples});
}

}  // namespace tessera::nn

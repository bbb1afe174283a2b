#include "tessera/pipeline/wire.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

namespace tessera::pipeline {
namespace {

enum What : int64_t { kTensors, kFailure, kTaken };
// A header has: What; number of the message; length of the form, and length of the note + 1, that follow (0: those of the message
// before); how many messages came the other way so far.
enum Field : size_t { kWhat, kNumber, kForm, kNote, kSoFar, kFields };

constexpr const char* kOfAnother =
    "of an earlier link between the same ranks; each link of two parts has an nn::Link::number of its own";

// A form has, for each tensor: dims (-1: undefined), dtype, whether it requires a gradient, sizes.
std::vector<int64_t> form_of(const Tensors& tensors) {
  std::vector<int64_t> form{static_cast<int64_t>(tensors.size())};
  for (const at::Tensor& t : tensors) {
    form.push_back(t.defined() ? t.dim() : -1);
    if (!t.defined()) continue;
    form.push_back(static_cast<int64_t>(t.scalar_type()));
    form.push_back(t.requires_grad() ? 1 : 0);
    form.insert(form.end(), t.sizes().begin(), t.sizes().end());
  }
  return form;
}

// Returns what make(sizes, dtype) gives for each tensor of that form, in order; those that require a gradient there do here.
template <class F>
Tensors tensors_of(const std::vector<int64_t>& form, const F& make) {
  Tensors made;
  auto next = form.begin();
  for (int64_t left = *next++; left > 0; --left) {
    const int64_t dims = *next++;
    if (dims < 0) {
      made.emplace_back();
      continue;
    }
    const auto dtype = static_cast<at::ScalarType>(*next++);
    const bool trained = *next++ != 0;
    made.push_back(make(std::vector<int64_t>(next, next + dims), dtype).requires_grad_(trained));
    next += dims;
  }
  return made;
}

}  // namespace

Wire::Wire(Peer peer, Line outgoing, Line incoming, at::Device device)
    : peer_(std::move(peer)), outgoing_(std::move(outgoing)), incoming_(std::move(incoming)), device_(device) {}

template <class F>
auto Wire::guarded(const Line& line, const F& body) const {
  std::string text;
  try {
    return body();
  } catch (const c10::DistBackendError& error) {
    text = error.what_without_backtrace();
  }
  TESSERA_CHECK_DIST(false, "pipeline", peer_.name, " is lost, or did not answer in time, while ", line.what,
                     " were under way; see its own output for the reason (", text.substr(0, text.find('\n')), ")");
}

// ---------------------------------------------------------------- sending

void Wire::put(const at::Tensor& tensor) {
  const at::Tensor there = tensor.detach().to(outgoing_.p2p->device()).contiguous();
  under_way_.back().tensors.push_back(
      guarded(outgoing_, [&] { return outgoing_.p2p->send(there, peer_.rank, outgoing_.tag, outgoing_.what); }));
}

void Wire::put_bytes(const std::string& text) {
  if (!text.empty())
    put(at::tensor(at::ArrayRef(reinterpret_cast<const uint8_t*>(text.data()), text.size()), at::kByte));
}

void Wire::begin(int64_t what, int64_t number, int64_t form, int64_t note) {
  under_way_.push_back({what, {}});
  put(at::tensor({what, number, form, note, taken_}, at::kLong));
}

void Wire::send(const Message& message, int64_t number) {
  Form form{form_of(message.tensors), message.note};
  const bool changed = form.tensors != sent_form_.tensors, noted = form.note != sent_form_.note;
  begin(kTensors, number, changed ? static_cast<int64_t>(form.tensors.size()) : 0,
        noted ? static_cast<int64_t>(form.note.size()) + 1 : 0);
  if (changed) put(at::tensor(form.tensors, at::kLong));
  if (noted) put_bytes(form.note);
  if (changed || noted) ++forms_;
  sent_form_ = std::move(form);
  for (const at::Tensor& t : message.tensors)
    if (t.defined() && t.numel() > 0) put(t);
}

void Wire::send_failure(const std::string& text) {
  begin(kFailure, 0, static_cast<int64_t>(text.size()), 0);
  put_bytes(text);
}

void Wire::try_to_send_failure(const std::string& text) {
  try {
    send_failure(text);
  } catch (const c10::DistBackendError&) {
  }
}

void Wire::acknowledge() {
  begin(kTaken, 0, 0, 0);
}

void Wire::settle_first() {
  for (const int64_t sent : under_way_.front().tensors)
    guarded(outgoing_, [&] { outgoing_.p2p->settle(sent); });
  under_way_.pop_front();
  ++acknowledged_;
}

void Wire::settle() {
  while (!under_way_.empty())
    settle_first();
}

// ---------------------------------------------------------------- receiving

void Wire::take(const at::Tensor& tensor) {
  guarded(incoming_, [&] { incoming_.p2p->receive(tensor, peer_.rank, incoming_.tag, incoming_.what); });
}

std::vector<int64_t> Wire::take_numbers(int64_t count) {
  at::Tensor tensor = at::empty({count}, at::TensorOptions(at::kLong).device(incoming_.p2p->device()));
  take(tensor);
  tensor = tensor.cpu();
  const auto* data = tensor.const_data_ptr<int64_t>();
  return {data, data + count};
}

std::string Wire::take_bytes(int64_t count) {
  at::Tensor tensor = at::empty({count}, at::TensorOptions(at::kByte).device(incoming_.p2p->device()));
  if (count > 0) take(tensor);
  tensor = tensor.cpu();
  return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<size_t>(count)};
}

// Reads the header of the next message, and lets go of the tensors that it acknowledges.
Wire::Header Wire::take_header() {
  Header header = take_numbers(kFields);
  ++taken_;
  while (acknowledged_ < header[kSoFar] && !under_way_.empty())
    settle_first();
  if (header[kWhat] == kFailure) TESSERA_FAIL(StageFailed, take_bytes(header[kForm]));
  return header;
}

Message Wire::receive(int64_t number) {
  if (early_.empty()) {
    Header header = take_header();
    while (header[kWhat] == kTaken)
      header = take_header();
    Message message = take_message(header);
    early_.emplace_back(std::move(header), std::move(message));
  }
  const auto [header, message] = std::move(early_.front());
  early_.pop_front();
  TESSERA_CHECK(header[kNumber] == number, "pipeline", peer_.name, " sent ", incoming_.what, " number ",
                header[kNumber], " where this stage expects number ", number,
                ": its schedule is another (build the engine with the same configuration on all ranks), or they are ",
                kOfAnother);
  return message;
}

Message Wire::take_message(const Header& header) {
  if (header[kForm] > 0) taken_form_.tensors = take_numbers(header[kForm]);
  if (header[kNote] > 0) taken_form_.note = take_bytes(header[kNote] - 1);
  if (header[kForm] > 0 || header[kNote] > 0) ++forms_;
  TESSERA_CHECK(!taken_form_.tensors.empty(), "pipeline", "the ", incoming_.what, " that came from ", peer_.name,
                " are ", kOfAnother);
  const auto take_tensor = [&](const std::vector<int64_t>& sizes, at::ScalarType dtype) {
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    const auto options = at::TensorOptions(dtype).device(incoming_.p2p->device());
    return (empty
                ? at::empty(sizes, options)
                : guarded(incoming_,
                          [&] { return incoming_.p2p->take(sizes, dtype, peer_.rank, incoming_.tag, incoming_.what); }))
        .to(device_);
  };
  return {tensors_of(taken_form_.tensors, take_tensor), taken_form_.note};
}

void Wire::await_taken(int64_t most) {
  while (under_way() > most) {
    const Header header = take_header();
    TESSERA_CHECK(header[kWhat] == kTaken, "pipeline", peer_.name, " sent ", incoming_.what, " number ",
                  header[kNumber],
                  " where it says what it has taken: its schedule is another; build the engine with the same "
                  "configuration on all ranks");
  }
}

int64_t Wire::awaited() const {
  return std::count_if(under_way_.begin(), under_way_.end(), [](const Sent& sent) { return sent.what == kTensors; });
}

void Wire::drain(int64_t most) {
  while (awaited() > most) {
    Header header = take_header();
    if (header[kWhat] == kTaken) continue;
    Message message = take_message(header);
    early_.emplace_back(std::move(header), std::move(message));
  }
}

}  // namespace tessera::pipeline

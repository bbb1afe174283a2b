#include "tessera/pipeline/wire.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "tessera/base/error.h"

namespace tessera::pipeline {
namespace {

enum What : int64_t { kTensors, kFailure };
constexpr int64_t kHeader =
    3;  // What, number of the message, length of what follows (0: the form of the message before)

at::Tensor numbers(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

// For each tensor: dims (-1: undefined), dtype, whether it requires a gradient, sizes.
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

// Tensors of that form, not filled, on the CPU; and which of them require a gradient.
std::pair<Tensors, std::vector<bool>> empty_of(const std::vector<int64_t>& form) {
  std::pair<Tensors, std::vector<bool>> made;
  auto next = form.begin();
  for (int64_t left = *next++; left > 0; --left) {
    const int64_t dims = *next++;
    if (dims < 0) {
      made.first.emplace_back();
      made.second.push_back(false);
      continue;
    }
    const auto dtype = static_cast<at::ScalarType>(*next++);
    made.second.push_back(*next++ != 0);
    made.first.push_back(at::empty(std::vector<int64_t>(next, next + dims), at::TensorOptions(dtype)));
    next += dims;
  }
  return made;
}

}  // namespace

Wire::Wire(comm::PointToPointPtr p2p, Peer peer, int tag, at::Device device, std::string what)
    : p2p_(std::move(p2p)), peer_(std::move(peer)), tag_(tag), device_(device), what_(std::move(what)) {}

template <class F>
void Wire::guarded(const F& body) const {
  std::string text;
  try {
    body();
    return;
  } catch (const c10::DistBackendError& error) {
    text = error.what_without_backtrace();
  }
  TESSERA_CHECK_DIST(false, "pipeline", peer_.name, " is lost, or did not answer in time, while ", what_,
                     " were under way; see its own output for the reason (", text.substr(0, text.find('\n')), ")");
}

void Wire::put(const at::Tensor& tensor) {
  guarded([&] { p2p_->send(tensor, peer_.rank, tag_, what_); });
}

void Wire::take(const at::Tensor& tensor) {
  guarded([&] { p2p_->receive(tensor, peer_.rank, tag_, what_); });
}

std::vector<int64_t> Wire::take_numbers(int64_t count) {
  const at::Tensor tensor = at::empty({count}, at::kLong);
  take(tensor);
  const auto* data = tensor.const_data_ptr<int64_t>();
  return {data, data + count};
}

void Wire::send(const Tensors& tensors, int64_t number) {
  std::vector<int64_t> form = form_of(tensors);
  const bool changed = form != form_;
  put(numbers({kTensors, number, changed ? static_cast<int64_t>(form.size()) : 0}));
  if (changed) {
    put(numbers(form));
    form_ = std::move(form);
    ++forms_;
  }
  for (const at::Tensor& t : tensors)
    if (t.defined() && t.numel() > 0) put(t.detach().cpu().contiguous());
}

void Wire::send_failure(const std::string& text) {
  put(numbers({kFailure, 0, static_cast<int64_t>(text.size())}));
  put(at::tensor(at::ArrayRef<uint8_t>(reinterpret_cast<const uint8_t*>(text.data()), text.size()), at::kByte));
}

Tensors Wire::receive(int64_t number) {
  const auto header = take_numbers(kHeader);
  const int64_t length = header[2];
  if (header[0] == kFailure) {
    const at::Tensor text = at::empty({length}, at::kByte);
    take(text);
    const std::string said(static_cast<const char*>(text.const_data_ptr()), static_cast<size_t>(length));
    TORCH_CHECK_WITH(DistBackendError, false, said);
  }
  TESSERA_CHECK(header[1] == number, "pipeline", peer_.name, " sent ", what_, " number ", header[1],
                " where this rank expects number ", number,
                ": its schedule is another; build the engine with the same configuration on all ranks");
  if (length > 0) {
    form_ = take_numbers(length);
    ++forms_;
  }
  auto [tensors, trained] = empty_of(form_);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    if (tensors[i].numel() > 0) take(tensors[i]);
    tensors[i] = tensors[i].to(device_).requires_grad_(trained[i]);
  }
  return std::move(tensors);
}

}  // namespace tessera::pipeline

#include "tessera/zero/ranks.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/comm/backends.h"
#include "tessera/optim/norm.h"
#include "tessera/shard/side_stream.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

Ranks::Ranks(comm::GroupPtr shard_group)
    : shard(std::move(shard_group)), replicate(comm::single_group()), model(comm::single_group()) {}

Ranks::Ranks(const comm::Mesh& mesh, comm::Axes varies)
    : shard(mesh.group(comm::kStateAxes.without(varies))),
      replicate(mesh.group(comm::Axes(comm::Axis::DpReplicate).without(varies))),
      model(mesh.group(comm::kModelAxes)),
      varies_along_model(varies.has(comm::Axis::Tp)) {}

Ranks Ranks::siblings() const {
  Ranks own = *this;
  for (comm::GroupPtr* group : {&own.shard, &own.replicate, &own.model})
    if ((*group)->size() > 1) *group = (*group)->sibling(device);
  return own;
}

// First every replica agrees within itself, then the replicas with the root's, then the slices of the model with the
// first: right for any root, since what other ranks sent is overwritten.
void Ranks::broadcast(const at::Tensor& tensor, int root, comm::Label label) const {
  shard->broadcast(tensor, root % shard->size(), label).wait();
  replicate->broadcast(tensor, root / shard->size(), label).wait();
  if (!varies_along_model) model->broadcast(tensor, 0, label).wait();
}

void Ranks::agree(const at::Tensor& numbers, comm::ReduceOp op, comm::Label label) const {
  if (all() == 1) return;
  const at::Tensor travelling = shard::sent_to(device, numbers);
  for (const comm::GroupPtr& group : {shard, replicate, model})
    if (group->size() > 1) group->all_reduce(travelling, op, label).wait();
  if (!device.is_cpu()) numbers.copy_(travelling);
}

std::vector<std::vector<double>> Ranks::gather(std::vector<double> mine, const std::vector<at::Tensor>& computed,
                                               comm::Label label) const {
  const bool there = all() > 1 && !computed.empty() && std::ranges::none_of(computed, &at::Tensor::is_cpu);
  if (!there)
    for (const double number : optim::read_numbers(computed))
      mine.push_back(number);
  if (all() == 1) return {mine};
  at::Tensor row = shard::sent_to(device, at::tensor(mine, at::kDouble));
  if (there) row = at::cat({row, at::stack(computed)});
  const int64_t width = row.numel();
  for (const comm::GroupPtr& group : {model, shard, replicate}) {
    if (group->size() == 1) continue;
    const at::Tensor rows = at::empty({group->size() * row.numel()}, row.options());
    group->all_gather(rows, row, label).wait();
    row = rows;
  }
  row = row.cpu();
  std::vector<std::vector<double>> rows;
  for (const double* at = row.const_data_ptr<double>(); std::cmp_less(rows.size(), all()); at += width)
    rows.emplace_back(at, at + width);
  return rows;
}

// Gathers along one group after the other: slices of the model, then shards, then replicas.
std::vector<std::string> Ranks::gather_text(const std::string& text, comm::Label label) const {
  std::vector<std::string> texts{text};
  for (const comm::GroupPtr& group : {model, shard, replicate}) {
    if (group->size() == 1) continue;
    const auto count = static_cast<int64_t>(texts.size());
    at::Tensor sizes = at::zeros({group->size(), count}, at::kLong);
    std::string joined;
    for (int64_t i = 0; i < count; ++i) {
      sizes[group->rank()][i] = static_cast<int64_t>(texts[i].size());
      joined += texts[i];
    }
    const at::Tensor all_sizes = sizes.to(device);
    group->all_gather(all_sizes.flatten(), all_sizes[group->rank()].flatten(), label).wait();
    sizes = all_sizes.cpu();
    const int64_t longest = std::max<int64_t>(1, sizes.sum(1).max().item<int64_t>());
    at::Tensor bytes = at::zeros({group->size(), longest}, at::kByte);
    std::memcpy(bytes[group->rank()].mutable_data_ptr(), joined.data(), joined.size());
    const at::Tensor travelling = bytes.to(device);
    group->all_gather(travelling.flatten(), travelling[group->rank()].flatten(), label).wait();
    bytes = travelling.cpu();
    texts.clear();
    for (int r = 0; r < group->size(); ++r) {
      const auto* at = static_cast<const char*>(bytes[r].const_data_ptr());
      for (int64_t i = 0; i < count; ++i) {
        const auto size = sizes[r][i].item<int64_t>();
        texts.emplace_back(at, static_cast<size_t>(size));
        at += size;
      }
    }
  }
  return texts;
}

// Tensors travel as bytes, which no back end looks at. Each tensor begins where any dtype may.
void broadcast_words(const Ranks& ranks, const std::vector<at::Tensor>& tensors, int root, comm::Label label) {
  constexpr int64_t kWidest = 16;  // bytes of an element
  const c10::AutoGradMode no_grad(false);
  if (ranks.all() == 1 || tensors.empty()) return;
  std::vector<int64_t> begins{0};
  for (const at::Tensor& tensor : tensors)
    begins.push_back(begins.back() + (tensor.numel() * tensor.element_size() + kWidest - 1) / kWidest * kWidest);
  const at::Tensor all = at::empty({begins.back()}, at::TensorOptions(at::kByte).device(ranks.device));
  const auto words = [&](size_t i) {
    const at::Tensor& like = tensors[i];
    return all.narrow(0, begins[i], like.numel() * like.element_size()).view(like.scalar_type());
  };
  for (size_t i = 0; i < tensors.size(); ++i)
    words(i).copy_(shard::flatten_like_param(tensors[i].detach(), tensors[i]));
  ranks.broadcast(all, root, label);
  for (size_t i = 0; i < tensors.size(); ++i)
    tensors[i].detach().copy_(shard::view_as_param(words(i), {0, tensors[i].numel()}, tensors[i]));
}

}  // namespace tessera::zero

#include "tessera/comm/torch_backend/sparse.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <functional>
#include <numeric>

#include "tessera/comm/reduce_rows.h"
#include "tessera/comm/shm/pieces.h"

namespace tessera::comm {
namespace {

constexpr int64_t kEach = kRecordBytes - kLine;  // the first line of a record is the number of entries

// Ranks must agree on the sizes of the tensor, not on the number of entries.
OpInfo info_of_sparse(const at::Tensor& t, Label label) {
  TESSERA_CHECK_VALUE(t.defined() && t.is_sparse() && t.is_cpu(), "comm", "all_reduce (", label,
                      "): takes sparse tensors in COO layout on the CPU here");
  std::string text = std::string(label) + (label.empty() ? "sparse" : " sparse");
  for (int64_t i = 0; i < t.dim(); ++i)
    text += (i == 0 ? " " : i == t.sparse_dim() ? " of " : "x") + std::to_string(t.size(i));
  OpInfo info = {.name = "all_reduce",
                 .label = std::move(text),
                 .bytes = t.numel() * static_cast<int64_t>(t.element_size()),
                 .dtype = t.scalar_type(),
                 .op = ReduceOp::Sum};
  TESSERA_CHECK_VALUE(can_reduce(info.dtype, info.op), "comm", describe(info), ": ", reduce_op_name(info.op),
                      " does not take dtype ", info.dtype);
  return info;
}

}  // namespace

ShmSparseSum::ShmSparseSum(int rank, int size, const at::Tensor& tensor, Label label)
    : ShmSparseSum(rank, size, tensor, info_of_sparse(tensor, label)) {}

ShmSparseSum::ShmSparseSum(int rank, int size, const at::Tensor& tensor, OpInfo info)
    : ShmOp(std::move(info), rank, size),
      sizes_(tensor.sizes().vec()),
      sparse_dim_(tensor.sparse_dim()),
      row_(sizes_.begin() + sparse_dim_, sizes_.end()),
      row_bytes_(
          std::accumulate(row_.begin(), row_.end(), static_cast<int64_t>(tensor.element_size()), std::multiplies<>())),
      entries_(size),
      received_(size) {
  const at::NoGradGuard guard;
  const at::Tensor mine = tensor.coalesce();
  const at::Tensor indices = mine.indices().contiguous(), values = mine.values().contiguous();
  entries_[rank] = mine._nnz();
  received_[rank] = at::empty({bytes(entries_[rank])}, at::kByte);
  copy_bytes(bytes_of(received_[rank]), bytes_of(indices), static_cast<int64_t>(indices.nbytes()));
  copy_bytes(bytes_of(received_[rank]) + indices.nbytes(), bytes_of(values), static_cast<int64_t>(values.nbytes()));
}

int64_t ShmSparseSum::steps_at_least() const {
  return steps_for(bytes(entries_[rank_]), kEach);
}

void ShmSparseSum::write(int64_t step, char* record) {
  std::memcpy(record, &entries_[rank_], sizeof(int64_t));
  const auto [begin, count] = piece(bytes(entries_[rank_]), kEach, step);
  copy_bytes(record + kLine, bytes_of(received_[rank_]) + begin, count);
}

std::string ShmSparseSum::read(int64_t step, const char* const* records) {
  int64_t steps = steps_at_least();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (step == 0) {
      std::memcpy(&entries_[r], records[r], sizeof(int64_t));
      received_[r] = at::empty({bytes(entries_[r])}, at::kByte);
    }
    steps = std::max(steps, steps_for(bytes(entries_[r]), kEach));
    const auto [begin, count] = piece(bytes(entries_[r]), kEach, step);
    copy_bytes(bytes_of(received_[r]) + begin, records[r] + kLine, count);
  }
  steps_ = steps;
  return {};
}

at::Tensor ShmSparseSum::sum() const {
  const at::NoGradGuard guard;
  std::vector<at::Tensor> indices, values;
  for (int r = 0; r < size_; ++r) {
    const int64_t place_bytes = entries_[r] * sparse_dim_ * 8;
    std::vector<int64_t> shape = {entries_[r]};
    shape.insert(shape.end(), row_.begin(), row_.end());
    const at::Tensor& all = received_[r];
    indices.push_back(all.narrow(0, 0, place_bytes).view(at::kLong).view({sparse_dim_, entries_[r]}));
    values.push_back(all.narrow(0, place_bytes, all.numel() - place_bytes).view(info_.dtype).view(shape));
  }
  const bool narrow = info_.dtype == at::kHalf || info_.dtype == at::kBFloat16;
  const at::Tensor added =
      at::_sparse_coo_tensor_unsafe(at::cat(indices, 1), at::cat(values).to(narrow ? at::kFloat : info_.dtype), sizes_)
          .coalesce();
  return narrow ? added.to(info_.dtype) : added;
}

}  // namespace tessera::comm

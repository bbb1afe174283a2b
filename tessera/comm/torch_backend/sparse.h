// The sum of sparse tensors of all ranks as a script of steps (see shm/op.h).
//
// Note [Sums of sparse tensors]
//   Ranks have different numbers of entries, so a record begins with how many its writer has. Everybody gets the entries
//   of all, and adds those of one place in rank order: in fp32 for bf16 and fp16, rounded once, as the dense sums are.
#pragma once

#include "tessera/comm/shm/op.h"

namespace tessera::comm {

class ShmSparseSum final : public ShmOp {
 public:
  // `tensor`: sparse COO on the CPU; it is not changed, and may change once this is made. Value error otherwise.
  ShmSparseSum(int rank, int size, const at::Tensor& tensor, Label label);

  std::optional<int64_t> steps() const override { return steps_; }
  int64_t steps_at_least() const override;
  void write(int64_t step, char* record) override;
  std::string read(int64_t step, const char* const* records) override;

  // The sum, coalesced; once the call is done.
  at::Tensor sum() const;

 private:
  ShmSparseSum(int rank, int size, const at::Tensor& tensor, OpInfo info);
  int64_t bytes(int64_t entries) const { return entries * (sparse_dim_ * 8 + row_bytes_); }

  const std::vector<int64_t> sizes_;
  const int64_t sparse_dim_;
  std::vector<int64_t> row_;  // sizes of an entry's values
  int64_t row_bytes_ = 0;
  std::vector<int64_t> entries_;      // of each rank
  std::vector<at::Tensor> received_;  // of each rank: indices, then values
  std::optional<int64_t> steps_;
};

}  // namespace tessera::comm

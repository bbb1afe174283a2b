// The collectives of the shared-memory group as scripts of steps.
//
// Note [Steps]
//   In every step each rank writes one record into its own ring, and reads the records of all others. A collective is a
//   number of steps; all ranks know how many and what lies in a record, so a record needs no description but the call it
//   belongs to. A rank's own record of a step is written before the others' are read, so inputs may be overwritten by
//   results in place. Nothing here waits: a step is done when the rings allow it.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/op_info.h"

namespace tessera::comm {

inline constexpr int64_t kRecordBytes = 64 * 1024;  // payload of a record; a ring of them stays in the caches

// What a rank can wait for: a collective, or a message to or from another rank.
class ShmCall {
 public:
  explicit ShmCall(OpInfo info) : info_(std::move(info)) {}
  virtual ~ShmCall() = default;
  ShmCall(const ShmCall&) = delete;
  ShmCall& operator=(const ShmCall&) = delete;

  const OpInfo& info() const { return info_; }
  // Set when all is through: results are there, and buffers may be used again.
  std::atomic<bool> done = false;

 protected:
  const OpInfo info_;
};

class ShmOp : public ShmCall {
 public:
  ShmOp(OpInfo info, int rank, int size)
      : ShmCall(std::move(info)), rank_(rank), size_(size), hash_(agreement_hash(info_)) {}

  uint64_t hash() const { return hash_; }  // agreement_hash(info())
  // Number of steps; nothing while it depends on what others will say in step 0.
  virtual std::optional<int64_t> steps() const = 0;
  // How many steps there are at least.
  virtual int64_t steps_at_least() const { return steps().value_or(1); }
  // Whether the record of `step` can be written once `received` steps are through.
  virtual bool ready(int64_t step, int64_t received) const { return true; }
  virtual void write(int64_t step, char* record) = 0;
  // `records[r]`: record of rank r; that of this rank is null. Returns what the ranks disagree about, empty for nothing.
  virtual std::string read(int64_t step, const char* const* records) = 0;

  // Progress, which the channel keeps.
  int64_t turn = 0;    // number among the calls of the channel, from 0
  int64_t first = -1;  // place of step 0 among all steps of the channel
  int64_t written = 0, received = 0;
  const std::vector<int>* numbers = nullptr;  // what ranks are called in messages; null: their numbers here

 protected:
  int number(int rank) const { return numbers != nullptr ? (*numbers)[rank] : rank; }

  const int rank_, size_;

 private:
  const uint64_t hash_;
};

using ShmCallPtr = std::shared_ptr<ShmCall>;
using ShmOpPtr = std::shared_ptr<ShmOp>;
using ShmTensors = std::vector<at::Tensor>;

// Tensors are contiguous, as for Group's calls, and are kept alive. Lists have a tensor for each rank; their sizes may
// differ from rank to rank, but all ranks know them alike. Value error when a tensor is not on the CPU or sizes of one
// rank do not fit together. Splits in elements.
ShmOpPtr shm_all_gather(int rank, int size, const at::Tensor& out, const at::Tensor& in, Label label);
ShmOpPtr shm_all_gather(int rank, int size, const ShmTensors& out, const at::Tensor& in, Label label);
ShmOpPtr shm_broadcast(int rank, int size, const at::Tensor& tensor, int root, Label label);
// `out` is empty but on the root; all inputs have one size.
ShmOpPtr shm_gather(int rank, int size, const ShmTensors& out, const at::Tensor& in, int root, Label label);
// `in` is empty but on the root; all outputs have one size.
ShmOpPtr shm_scatter(int rank, int size, const at::Tensor& out, const ShmTensors& in, int root, Label label);
ShmOpPtr shm_all_to_all(int rank, int size, const at::Tensor& out, const at::Tensor& in,
                        std::vector<int64_t> out_splits, std::vector<int64_t> in_splits, Label label);
// Exchanges tensors of which only sender and receiver need to know the size.
ShmOpPtr shm_all_to_all(int rank, int size, const ShmTensors& out, const ShmTensors& in, Label label);
ShmOpPtr shm_barrier(int rank, int size, Label label);

// The collectives that add: sum.cpp.
ShmOpPtr shm_reduce_scatter(int rank, int size, const at::Tensor& out, const at::Tensor& in, ReduceOp op, Label label);
ShmOpPtr shm_reduce_scatter(int rank, int size, const at::Tensor& out, const ShmTensors& in, ReduceOp op, Label label);
ShmOpPtr shm_all_reduce(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label);
ShmOpPtr shm_reduce(int rank, int size, const at::Tensor& tensor, ReduceOp op, int root, Label label);

}  // namespace tessera::comm

// The collectives of the shared-memory group as scripts of steps.
//
// Note [Steps]
//   In every step each rank writes one record into its own ring, and reads the records of all others. A collective is a
//   number of steps; all ranks know how many and what lies in a record, so a record needs no description but the call it
//   belongs to. A rank's own record of a step is written before the others' are read, so inputs may be overwritten by
//   results in place. Nothing here waits: a step is done when the rings allow it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/op_info.h"

namespace tessera::comm {

inline constexpr int64_t kRecordBytes = 64 * 1024;  // payload of a record; a ring of them stays in the caches

class ShmOp {
 public:
  ShmOp(OpInfo info, int rank, int size)
      : info_(std::move(info)), rank_(rank), size_(size), hash_(agreement_hash(info_)) {}
  virtual ~ShmOp() = default;

  const OpInfo& info() const { return info_; }
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

  // Progress, kept by the channel.
  int64_t first = -1;  // place of step 0 among all steps of the channel
  int64_t written = 0, received = 0;
  bool done = false;

 protected:
  const OpInfo info_;
  const int rank_, size_;

 private:
  const uint64_t hash_;
};

using ShmOpPtr = std::shared_ptr<ShmOp>;

// Tensors as Group's protected calls get them; splits in elements. They are kept alive.
ShmOpPtr shm_all_gather(int rank, int size, const at::Tensor& out, const at::Tensor& in, Label label);
ShmOpPtr shm_reduce_scatter(int rank, int size, const at::Tensor& out, const at::Tensor& in, ReduceOp op, Label label);
ShmOpPtr shm_all_reduce(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label);
ShmOpPtr shm_broadcast(int rank, int size, const at::Tensor& tensor, int root, Label label);
ShmOpPtr shm_all_to_all(int rank, int size, const at::Tensor& out, const at::Tensor& in,
                        std::vector<int64_t> out_splits, std::vector<int64_t> in_splits, Label label);
ShmOpPtr shm_barrier(int rank, int size, Label label);

}  // namespace tessera::comm

// FlatParams: the compute parameters of one unit in one flat space: whole on every rank, or sharded and gathered into a
// bucket while they are used.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/shard/layout.h"
#include "tessera/zero/data_parallel.h"

namespace c10 {
struct StorageImpl;
}

namespace tessera::zero {

enum class ParamState : uint8_t {
  Sharded,    // this rank holds its slice; the parameters have no data
  Gathering,  // a collective fills the bucket
  Ready,      // the parameters point into the bucket (or into the whole buffer, always)
};

// How fp32 values become bf16 weights.
enum class Cast : uint8_t {
  Nearest,  // as torch casts: ties to even
  HalfUp,   // ties away from zero: the upper half of a split master (kernels/split.h)
};

// How one parameter is held now, on this rank.
struct ParamPartition {
  ParamState state = ParamState::Ready;
  bool partitioned = false;  // false: whole on every rank, always
  shard::Range held;         // this rank's elements of the flattened parameter
  at::Tensor values;         // theirs, 1-D view
};

class FlatParams {
 public:
  struct Item {
    std::string name;
    at::Tensor tensor;  // the module's own leaf
    shard::Range range;
  };

  // Takes over the storage of the items' tensors, whose values it keeps, rounded to `dtype`. Local: all ranks bring the
  // same values. `shard_rank` of `shards` ranks; whole on every rank unless `sharded` and shards > 1.
  FlatParams(std::string name, std::vector<Item> items, at::ScalarType dtype, int shard_rank, int shards, bool sharded,
             Cast cast = Cast::Nearest);

  const std::string& name() const { return name_; }
  const std::vector<Item>& items() const { return items_; }
  const shard::Layout& layout() const { return layout_; }
  ParamState state() const { return state_; }
  bool sharded() const { return sharded_; }
  at::ScalarType dtype() const { return buffer_.scalar_type(); }
  int64_t bytes() const { return static_cast<int64_t>(buffer_.nbytes()); }

  // This rank's slice of the flat space.
  shard::Range slice() const { return slice_; }
  // The values of `range`, whole buffers only, or the slice of them.
  at::Tensor slice_values() const;
  // The whole flat space. Only while Ready.
  const at::Tensor& whole() const;

  // Gathered values travel in `dtype` and are cast back: rounded, except in a gather that asks for exact ones.
  void gather_in(at::ScalarType dtype) { gather_dtype_ = dtype; }
  bool gathers_rounded() const { return gather_dtype_ != dtype(); }
  at::ScalarType gather_dtype() const { return gather_dtype_; }
  // Sharded -> Gathering: collective. `bucket`: at least layout().size() elements of dtype(). `staging`: as many of
  // gather_dtype(), for rounded values, or undefined. Undone when it throws.
  void begin_gather(comm::Group& group, at::Tensor bucket, at::Tensor staging = {});
  // Ready with rounded values -> with exact ones, in place. Collective.
  void make_exact(comm::Group& group);
  bool is_rounded() const { return rounded_; }
  // The staging buffer of the last gather, once it is over; undefined without one.
  at::Tensor take_staging() { return std::move(staging_); }
  at::Tensor take_bucket() { return std::move(bucket_); }
  // Gathering -> Ready. When it throws (a lost peer, a replaced parameter) the state is Sharded; take_bucket() and
  // take_staging() give the buffers back.
  void finish_gather();
  // Ready or Gathering -> Sharded; returns the bucket. Nothing may read the parameters any more. `edited` gets the name
  // of a parameter that was written to since it was gathered and not kept by keep_write.
  at::Tensor release(std::string* edited = nullptr);
  // Item `index` was written to on purpose: this rank's slice follows.
  void keep_write(int index);
  // Forgets that item `index` was written to.
  void mark(int index) { versions_[index] = items_[index].tensor._version(); }
  bool was_written(int item) const { return items_[item].tensor._version() != versions_[item]; }

  ParamPartition partition_of(int index) const;
  // Item `index` in this flat space with the parameter's shape. Only while Ready.
  at::Tensor view(int index) const;

  // For good: parameters without data say `message`. Local.
  void abandon(const std::string& message);

 private:
  void point_items();
  void release_items();
  std::string message(const Item& item) const;

  std::string name_;
  std::vector<Item> items_;
  std::vector<c10::StorageImpl*> storages_;  // sharded only: to see that nobody replaced one
  std::vector<uint32_t> versions_;           // at the last gather
  shard::Layout layout_;
  shard::Range slice_;
  bool sharded_ = false;
  ParamState state_ = ParamState::Ready;
  at::Tensor buffer_;  // the whole space, or this rank's slice where sharded
  at::Tensor bucket_;  // sharded: the gathered space, exactly layout().size() elements
  at::Tensor staging_;
  at::ScalarType gather_dtype_;
  bool rounded_ = false;  // the bucket holds values that were cast on the way
  comm::Pending pending_;
};

// Rank 0's values into every rank's tensors (whole ones), one collective for all of them. `what` is for messages.
void broadcast_values(const DataParallel& ranks, const std::vector<FlatParams::Item>& items, const std::string& what);

}  // namespace tessera::zero

// FlatParams: the compute parameters of one unit in one flat space: whole on every rank, or sharded and gathered into a
// bucket while they are used. What it is made of: the module's tensors (ModuleParams), the buffer that this rank keeps, memory that
// all ranks share (SharedSpace), the gathered space (GatheredSpace) and the way there of a slice that is elsewhere (AwaySlice).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/shard/buffer.h"
#include "tessera/shard/layout.h"
#include "tessera/zero/gathered_space.h"
#include "tessera/zero/module_params.h"
#include "tessera/zero/options.h"
#include "tessera/zero/ranks.h"
#include "tessera/zero/shared_space.h"

namespace tessera::zero {

enum class ParamState : uint8_t {
  Sharded,    // this rank holds its slice; the parameters have no data
  Gathering,  // a collective fills the bucket
  Ready,      // the parameters point into the bucket (or into the whole buffer, always)
};

// How one parameter is held now, on this rank.
struct ParamPartition {
  ParamState state = ParamState::Ready;
  bool partitioned = false;  // false: whole on every rank, always
  shard::Range held;         // this rank's elements of the flattened parameter
};

class FlatParams {
 public:
  using Item = ModuleParams::Item;

  // Takes over the storage of the items' tensors, whose values it keeps, rounded to `dtype`. Local: all ranks bring the
  // same values. `shard_rank` of `shards` ranks; whole on every rank unless `sharded` and shards > 1. `space`: zeroed memory
  // of all shard ranks for layout().size() elements of `dtype`; each writes its slice, so the others must wait before they
  // read. Undefined: memory of this rank's own. `home`: where a slice lives; IoError where it cannot, and the tensors are as
  // they were. Not with a `space`: value error.
  FlatParams(std::string name, std::vector<Item> items, at::ScalarType dtype, int shard_rank, int shards, bool sharded,
             at::Tensor space = {}, const HomeMaker& home = {});
  FlatParams(const FlatParams&) = delete;
  FlatParams& operator=(const FlatParams&) = delete;

  const std::string& name() const { return name_; }
  const std::vector<Item>& items() const { return params_.items(); }
  const shard::Layout& layout() const { return params_.layout(); }
  ParamState state() const { return state_; }
  bool sharded() const { return sharded_; }
  at::ScalarType dtype() const { return buffer_.dtype(); }
  const at::TensorOptions& options() const { return buffer_.options(); }  // of gathered values
  // Bytes of this rank's own values, wherever they live; 0 where they lie in memory that all shard ranks have.
  int64_t bytes() const { return shares() ? 0 : buffer_.bytes(); }
  shard::Residence residence() const { return buffer_.residence(); }
  int64_t local_size() const { return buffer_.size(); }
  int64_t shared_bytes() const { return shares() ? static_cast<int64_t>(space_.memory().nbytes()) : 0; }
  bool shares() const { return space_.defined(); }

  // This rank's slice of the flat space.
  shard::Range slice() const { return slice_; }
  // The slice's values: for reading, and to be written.
  shard::Buffer slice_values() const;
  shard::Buffer slice_to_write();
  // Returns when what was written is where it lives; throws what went wrong on the way.
  void flush() const { buffer_.flush(); }
  // The whole flat space, without private copies of single parameters. Only while Ready.
  const at::Tensor& whole() const;

  // Gathered values travel in `dtype` and are cast back: rounded, except in a gather that asks for exact ones.
  void gather_in(at::ScalarType dtype) { gathered_.travel_in(dtype); }
  bool gathers_rounded() const { return gathered_.travels_rounded(); }
  at::ScalarType gather_dtype() const { return gathered_.travels_in(); }
  // Starts reads of a slice on a disk for the next gather, up to `elements` from its first on. Returns how many are on their way,
  // 0 where the slice is not on a disk. Local.
  int64_t read_ahead(int64_t elements);
  // Forgets what was read ahead. Writes nothing where nothing was read: an update may run on beside this call.
  void forget_ahead() { gathered_.away().forget_ahead(); }
  // Sharded -> Gathering: collective. `bucket`: at least layout().size() elements of dtype(). `staging`: as many of
  // gather_dtype(), for rounded values, or undefined. Undone when it throws. Shared parameters: local; without a bucket
  // the parameters will point into the shared space; a staging buffer may have any size.
  void begin_gather(comm::Group& group, at::Tensor bucket, at::Tensor staging = {});
  // Ready with rounded values -> Ready with exact ones, in place. Collective (shared parameters: local).
  void make_exact(comm::Group& group);
  // make_private(): shared parameters that are Ready in the shared space come to `bucket`, with a copy of the values.
  bool is_in_space() const { return shares() && gathered_.bucket().is_same(space_.memory()); }
  void make_private(const at::Tensor& bucket);
  bool is_rounded() const { return gathered_.is_rounded(); }
  // The staging buffer of the last gather, once it is over; undefined without one.
  at::Tensor take_staging() { return gathered_.take_staging(); }
  // The bucket of the last gather; undefined where the parameters were in the shared space, as it is for release().
  at::Tensor take_bucket();
  // Gathering -> Ready. When it throws (a lost peer, a disk, a replaced parameter) the state is Sharded; take_bucket() and
  // take_staging() give the buffers back.
  void finish_gather();
  // Ready or Gathering -> Sharded; returns the bucket. Nothing may read the parameters any more. `edited` gets the name
  // of a parameter that was written to since it was gathered and not kept by keep_write.
  at::Tensor release(std::string* edited = nullptr);
  // Parameters that are Ready already are used again, maybe under another stream.
  void use() { gathered_.use(); }
  // Ready: where the user gave item `index` other data (p.data = ...), the new values come to the item's place, and the item lies
  // there again; who holds the memory there keeps it (Note [Memory that somebody else holds]). State error for another shape
  // or dtype.
  void take_replaced(int index);
  // Item `index` was written to on purpose: this rank's slice follows.
  void keep_write(int index);
  // Forgets that item `index` was written to.
  void mark(int index) { params_.mark(index); }
  // Whether the user gave a parameter of a sharded space other data (p.data = ...), or its own data in another order.
  bool is_replaced(int item) const { return params_.is_replaced(item); }
  bool was_written(int item) const { return params_.was_written(item); }
  // Nobody else holds the parameter's tensor.
  bool is_alone(int item) const { return params_.is_alone(item); }

  ParamPartition partition_of(int index) const;
  // Elements `part` of the flattened item, which this rank holds, 1-D: a view where they live on the device, else a copy.
  at::Tensor read(int index, shard::Range part) const;
  void write(int index, shard::Range part, const at::Tensor& values);
  // Elements of item `index`: in the order of the flat space, and with the parameter's shape. Only while Ready.
  at::Tensor values(int index) const;
  at::Tensor view(int index) const;

  // Shared parameters that are whole always: item `index` is a private copy from here on, until end_private_copy(), which forgets
  // it. keep_write() between the two writes the copy to this rank's slice.
  void make_private_copy(int index);
  void end_private_copy(int index);
  bool has_private_copy(int index) const { return space_.copy_of(index).defined(); }

  // Values on the device go to what `home` makes for a while (null: they stay), and come back. Whole parameters have no data
  // meanwhile, and an access says what to call. Not for gathered or shared parameters. Local.
  void send(const HomeMaker& home);
  void bring_back();
  bool is_sent() const { return buffer_.is_sent(); }

  // While the parameters are gathered: copies all items to memory of their own, for leave(), which follows once they are not.
  at::Tensor copy_all() const { return whole().clone(); }
  // For good: the items live in `all`, which copy_all() gave, and this object holds nothing any more. Local.
  void leave(const at::Tensor& all);
  // For good: parameters of one rank that live elsewhere are on the device again. Only abandon() may follow. Local.
  void make_whole();
  // For good: an access to parameters without data says `message`; shared ones that are whole get memory of their own. Local.
  void abandon(const std::string& message);

 private:
  void send_to(const shard::HomePtr& home);
  OwnSlice own() const { return {buffer_, slice_, layout().size()}; }
  shard::Range there(int index, shard::Range part) const;
  void leave_space();

  const std::string name_;
  ModuleParams params_;
  const shard::Range slice_;
  bool sharded_ = false;
  ParamState state_ = ParamState::Ready;
  shard::Buffer buffer_;    // the whole space, or this rank's slice where sharded
  SharedSpace space_;       // memory of all ranks, which buffer_ is part of
  GatheredSpace gathered_;  // where sharded
};

}  // namespace tessera::zero

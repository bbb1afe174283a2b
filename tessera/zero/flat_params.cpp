#include "tessera/zero/flat_params.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/dtype.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

FlatParams::FlatParams(std::string name, std::vector<Item> items, at::ScalarType dtype, int shard_rank, int shards,
                       bool sharded, at::Tensor space, const HomeMaker& home)
    : name_(std::move(name)), items_(std::move(items)), space_(std::move(space), items_.size()), away_(name_, order_) {
  std::vector<int64_t> numels;
  numels.reserve(items_.size());
  for (Item& item : items_) {
    numels.push_back(item.tensor.numel());
    item.form = item.tensor;
  }
  layout_ = shard::Layout(numels, shards);
  slice_ = layout_.shard(shard_rank);
  const auto options = items_.front().tensor.options().requires_grad(false).dtype(dtype);
  const shard::HomePtr away = sharded && home ? home(shard::Quantity::Weight, slice_.size(), options) : nullptr;
  sharded_ = sharded && (shards > 1 || away != nullptr);
  TESSERA_ASSERT(!shares() || (space_.memory().numel() == layout_.size() && space_.memory().scalar_type() == dtype));
  TESSERA_CHECK_VALUE(!shares() || away == nullptr, "zero",
                      "parameters that all ranks share (tessera.shared_parameters) cannot be offloaded "
                      "(offload_param): choose one of the two");
  at::Tensor mine;
  if (shares()) {
    mine = sharded_ ? space_.memory().narrow(0, slice_.begin, slice_.size()) : space_.memory();
  } else {
    mine = at::zeros({sharded_ ? slice_.size() : layout_.size()}, options);
  }
  gather_dtype_ = dtype;
  const int64_t origin = sharded_ ? slice_.begin : 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    Item& item = items_[i];
    item.range = layout_.param(static_cast<int>(i));
    const shard::Range held = sharded_ || shares() ? shard::intersect(item.range, slice_) : item.range;
    if (held.empty()) continue;
    const at::Tensor values = shard::flatten_like_param(item.tensor, item.form);
    mine.narrow(0, held.begin - origin, held.size())
        .copy_(values.narrow(0, held.begin - item.range.begin, held.size()));
  }
  buffer_ = away ? shard::Buffer(slice_.size(), options, away) : shard::Buffer(mine);
  if (away) buffer_.write({0, slice_.size()}, mine);
  writes_.resize(items_.size());
  for (Item& item : items_) {
    if (sharded_) {
      shard::make_released(item.tensor, item.form, options, message(item));
    } else {
      shard::bind(item.tensor, buffer_.tensor(), item.range, item.form);
    }
    storages_.push_back(shard::weak_storage_of(item.tensor));
  }
  if (sharded_) state_ = ParamState::Sharded;
}

std::string FlatParams::message(const Item& item) const {
  return "[zero] parameter '" + item.name +
         "' is partitioned over the ranks and not gathered now; read or edit it inside GatheredParameters, or use it "
         "in "
         "the forward of the module that owns it (register_external_parameter for another module; a module that "
         "zero.Init "
         "built after the engine: optimizer.add_param_group makes it whole). In a backward: the forward must return "
         "what "
         "its gradients come from; a tensor kept elsewhere (on self, in a closure) cannot be seen";
}

shard::Buffer FlatParams::slice_values() const {
  return sharded_ || slice_.size() == buffer_.size() ? buffer_ : shard::Buffer(buffer_.view(slice_));
}

shard::Buffer FlatParams::slice_to_write() {
  away_.end_reads();
  return slice_values();
}

const at::Tensor& FlatParams::whole() const {
  TESSERA_ASSERT(state_ == ParamState::Ready);
  return sharded_ ? bucket_ : buffer_.tensor();
}

at::Tensor FlatParams::values(int index) const {
  const shard::Range range = items_[index].range;
  return has_private_copy(index) ? space_.copy_of(index) : whole().narrow(0, range.begin, range.size());
}

at::Tensor FlatParams::view(int index) const {
  return shard::view_as_param(values(index), {0, items_[index].range.size()}, items_[index].form);
}

ParamPartition FlatParams::partition_of(int index) const {
  const shard::Range range = items_[index].range;
  const shard::Range mine = sharded_ ? shard::intersect(range, slice_) : range;
  if (mine.empty()) return {state_, sharded_, {}};
  return {state_, sharded_, {mine.begin - range.begin, mine.end - range.begin}};
}

// In the coordinates of the buffer.
shard::Range FlatParams::there(int index, shard::Range part) const {
  if (part.empty()) return {};
  const int64_t begin = items_[index].range.begin + part.begin - (sharded_ ? slice_.begin : 0);
  return {begin, begin + part.size()};
}

at::Tensor FlatParams::read(int index, shard::Range part) const {
  return buffer_.read(there(index, part));
}

void FlatParams::write(int index, shard::Range part, const at::Tensor& values) {
  slice_to_write();  // nothing was read ahead that is old now
  buffer_.write(there(index, part), values);
}

void FlatParams::begin_gather(comm::Group& group, at::Tensor bucket, at::Tensor staging) {
  TESSERA_ASSERT(state_ == ParamState::Sharded);
  order_ = {};
  order_.write(options().device());
  rounded_ = staging.defined();
  if (shares()) {
    if (bucket.defined()) {
      bucket_ = bucket.narrow(0, 0, layout_.size());
      space_.copy_to(bucket_, staging);
      staging_ = std::move(staging);
    } else {
      bucket_ = space_.memory();
    }
    state_ = ParamState::Gathering;
    return;
  }
  TESSERA_ASSERT(bucket.numel() >= layout_.size());
  bucket_ = bucket.numel() == layout_.size() ? std::move(bucket) : bucket.narrow(0, 0, layout_.size());
  const std::string label = "parameters of unit '" + name_ + "'";
  if (!buffer_.is_here()) {
    pending_ = away_.gather_beside(group, buffer_, slice_, rounded_ ? staging : bucket_, rounded_, label);
    staging_ = std::move(staging);
  } else if (rounded_) {
    const at::Tensor mine = staging.narrow(0, slice_.begin, slice_.size());
    shard::scaled_copy(mine, buffer_.tensor());
    pending_ = group.all_gather(staging, mine, label);
    staging_ = std::move(staging);
  } else {
    pending_ = group.all_gather(bucket_, buffer_.tensor(), label);
  }
  state_ = ParamState::Gathering;
}

int64_t FlatParams::read_ahead(int64_t elements) {
  if (buffer_.residence() != shard::Residence::Nvme || state_ != ParamState::Sharded) return 0;
  return away_.read_ahead(buffer_, elements);
}

void FlatParams::make_exact(comm::Group& group) {
  TESSERA_ASSERT(sharded_ && state_ == ParamState::Ready);
  if (!rounded_) return;
  order_.write(options().device());
  if (shares()) {
    space_.copy_to(bucket_);
  } else if (const std::string label = "exact parameters of unit '" + name_ + "'"; buffer_.is_here()) {
    group.all_gather(bucket_, buffer_.tensor(), label).wait();
  } else {
    away_.gather(group, buffer_, slice_, bucket_, label).wait();
    away_.arrive(bucket_.device());
    away_.check();
  }
  rounded_ = false;
}

void FlatParams::make_private(const at::Tensor& bucket) {
  TESSERA_ASSERT(sharded_ && state_ == ParamState::Ready && is_in_space());
  bucket_ = bucket.narrow(0, 0, layout_.size());
  space_.copy_to(bucket_);
  point_items();
}

at::Tensor FlatParams::take_bucket() {
  away_.end_gather();
  const bool borrowed = is_in_space();
  const at::Tensor bucket = std::exchange(bucket_, at::Tensor());
  return borrowed ? at::Tensor() : bucket;
}

void FlatParams::finish_gather() {
  TESSERA_ASSERT(state_ == ParamState::Gathering);
  state_ = ParamState::Sharded;
  order_.write(options().device());
  pending_.wait();
  away_.arrive(bucket_.device());
  away_.check();
  if (rounded_ && !shares()) shard::scaled_copy(bucket_, staging_);
  for (size_t i = 0; i < items_.size(); ++i) {
    TESSERA_CHECK(!is_replaced(static_cast<int>(i)), "zero", "the data of parameter '", items_[i].name,
                  "' was replaced (p.data = ..., module.to(...)) while it was partitioned; write to it inside "
                  "GatheredParameters(..., modifier_rank=0) instead");
  }
  point_items();
  state_ = ParamState::Ready;
}

void FlatParams::point_items() {
  char* base = static_cast<char*>(bucket_.mutable_data_ptr());
  const auto width = static_cast<int64_t>(bucket_.element_size());
  for (size_t i = 0; i < items_.size(); ++i) {
    if (const auto storage = storages_[i].lock()) shard::point(*storage, base + items_[i].range.begin * width);
    mark(static_cast<int>(i));
  }
}

void FlatParams::release_items() {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (has_storage(i)) shard::release_again(*shard::storage_of(items_[i].tensor));
  }
}

at::Tensor FlatParams::release(std::string* edited) {
  TESSERA_ASSERT(sharded_ && state_ != ParamState::Sharded);
  order_.write(options().device());
  if (state_ == ParamState::Gathering) {
    state_ = ParamState::Sharded;
    pending_.wait();
    away_.drop(bucket_.device());
    return take_bucket();
  }
  if (edited != nullptr) {
    for (size_t i = 0; i < items_.size(); ++i) {
      if (was_written(static_cast<int>(i))) *edited = items_[i].name;
    }
  }
  release_items();
  state_ = ParamState::Sharded;
  return take_bucket();
}

bool FlatParams::is_replaced(int index) const {
  const Item& item = items_[index];
  return !has_storage(index) || item.tensor.sizes() != item.form.sizes || item.tensor.strides() != item.form.strides ||
         item.tensor.storage_offset() != 0;
}

// Its storage is another one then, which becomes one of ours.
void FlatParams::take_replaced(int index) {
  TESSERA_ASSERT(state_ == ParamState::Ready);
  Item& item = items_[index];
  const bool apart = has_private_copy(index);
  const at::Tensor there = apart ? space_.copy_of(index) : whole();
  const shard::Range range = apart ? shard::Range{0, item.range.size()} : item.range;
  if (sharded_ ? !is_replaced(index) : shard::is_bound(item.tensor, there, range, item.form)) return;
  TESSERA_CHECK(item.tensor.sizes() == item.form.sizes && item.tensor.scalar_type() == dtype(), "zero",
                "the data of parameter '", item.name, "' was replaced by a tensor of shape ", item.tensor.sizes(),
                " and dtype ", item.tensor.scalar_type(), "; it is ", at::IntArrayRef(item.form.sizes), " and ",
                dtype());
  shard::move_out(storages_[index]);
  view(index).copy_(item.tensor.detach());
  if (!sharded_) {
    shard::bind(item.tensor, there, range, item.form);
  } else {
    shard::point(*shard::make_released(item.tensor, item.form, options(), message(item)),
                 values(index).mutable_data_ptr());
  }
  note_storage(index);
}

void FlatParams::keep_write(int index) {
  take_replaced(index);
  mark(index);
  if (!sharded_ && !has_private_copy(index)) return;
  const Item& item = items_[index];
  const shard::Range range = item.range, mine = shard::intersect(range, slice_);
  if (mine.empty()) return;
  const shard::Range part{mine.begin - range.begin, mine.end - range.begin};
  write(index, part, values(index).narrow(0, part.begin, part.size()));
}

void FlatParams::make_private_copy(int index) {
  TESSERA_ASSERT(shares() && !sharded_ && !has_private_copy(index));
  space_.make_copy(index, items_[index].tensor, items_[index].range);
}

void FlatParams::end_private_copy(int index) {
  if (!has_private_copy(index)) return;
  Item& item = items_[index];
  if (!space_.end_copy(index, item.tensor, item.range, item.form)) note_storage(index);
}

// A model that goes on without its engine must not change that of the other ranks.
void FlatParams::leave_space() {
  const c10::InferenceMode no_inference(false);
  const at::Tensor own = space_.memory().clone();
  for (const Item& item : items_)
    if (shard::is_bound(item.tensor, space_.memory(), item.range, item.form))
      shard::rebind(item.tensor, own, item.range);
  buffer_ = shard::Buffer(own);
  space_.reset();
}

void FlatParams::send_to(const shard::HomePtr& home) {
  TESSERA_ASSERT(!shares() && (!sharded_ || state_ == ParamState::Sharded));
  if (!buffer_.is_here()) return;
  const at::Tensor here = buffer_.tensor();
  buffer_.send_to(home);
  if (sharded_) return;
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    if (!shard::is_bound(item.tensor, here, item.range, item.form)) continue;
    note_storage(i);
    shard::release(*shard::storage_of(item.tensor), "[zero] parameter '" + item.name +
                                                        "' was moved off the device by engine.offload_states(); call "
                                                        "engine.reload_states() before it is used");
  }
}

void FlatParams::bring_back() {
  const bool whole_and_away = !sharded_ && !buffer_.is_here();
  buffer_.bring_back();
  if (!whole_and_away) return;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (has_storage(i)) shard::rebind(items_[i].tensor, buffer_.tensor(), items_[i].range);
  }
}

void FlatParams::leave(const at::Tensor& all) {
  TESSERA_ASSERT(!sharded_ || state_ == ParamState::Sharded);
  slice_to_write();  // nothing is on its way any more
  for (Item& item : items_)
    shard::bind(item.tensor, all, item.range, item.form);
  items_.clear();
  storages_.clear();
  writes_.clear();
  sharded_ = false;
  state_ = ParamState::Ready;
  buffer_ = {};
  space_.reset();
}

void FlatParams::make_whole() {
  if (!sharded_ || slice_.size() != layout_.size()) return;
  const at::Tensor all = buffer_.read(slice_);
  for (Item& item : items_)
    shard::bind(item.tensor, all, item.range, item.form);
}

void FlatParams::abandon(const std::string& message) {
  if (!sharded_) {
    if (shares()) leave_space();
    return;
  }
  order_.end(options().device());  // what is in flight ends on the current stream
  pending_.release();
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!has_storage(i)) continue;
    shard::release(*shard::storage_of(items_[i].tensor),
                   "[zero] parameter '" + items_[i].name + "' is partitioned: " + message);
  }
  state_ = ParamState::Sharded;
  away_.abandon();
  for (at::Tensor* memory : {&bucket_, &staging_}) {
    order_.keep(*memory, away_.copied());
    memory->reset();
  }
  if (buffer_.is_here()) order_.keep(buffer_.tensor(), away_.copied());
}

}  // namespace tessera::zero

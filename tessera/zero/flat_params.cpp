#include "tessera/zero/flat_params.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "tessera/base/error.h"

namespace tessera::zero {

FlatParams::FlatParams(std::string name, std::vector<Item> items, at::ScalarType dtype, int shard_rank, int shards,
                       bool sharded, at::Tensor space, const HomeMaker& home)
    : name_(std::move(name)),
      params_(std::move(items), shards),
      slice_(layout().shard(shard_rank)),
      space_(std::move(space), this->items().size()),
      gathered_(name_, dtype, this->items().front().tensor.device()) {
  const auto options = this->items().front().tensor.options().requires_grad(false).dtype(dtype);
  const shard::HomePtr away = sharded && home ? home(shard::Quantity::Weight, slice_.size(), options) : nullptr;
  sharded_ = sharded && (shards > 1 || away != nullptr);
  TESSERA_ASSERT(!shares() || (space_.memory().numel() == layout().size() && space_.memory().scalar_type() == dtype));
  TESSERA_CHECK_VALUE(!shares() || away == nullptr, "zero",
                      "parameters that all ranks share (tessera.shared_parameters) cannot be offloaded "
                      "(offload_param): choose one of the two");
  at::Tensor mine;
  if (shares()) {
    mine = sharded_ ? space_.memory().narrow(0, slice_.begin, slice_.size()) : space_.memory();
  } else {
    mine = at::zeros({sharded_ ? slice_.size() : layout().size()}, options);
  }
  params_.copy_to(mine, sharded_ || shares() ? slice_ : shard::Range{0, layout().size()}, sharded_ ? slice_.begin : 0);
  buffer_ = away ? shard::Buffer(slice_.size(), options, away) : shard::Buffer(mine);
  if (away) buffer_.write({0, slice_.size()}, mine);
  if (sharded_) {
    params_.make_released(options);
    state_ = ParamState::Sharded;
  } else {
    params_.bind(buffer_.tensor());
  }
}

shard::Buffer FlatParams::slice_values() const {
  return sharded_ || slice_.size() == buffer_.size() ? buffer_ : shard::Buffer(buffer_.view(slice_));
}

shard::Buffer FlatParams::slice_to_write() {
  gathered_.away().end_reads();
  return slice_values();
}

const at::Tensor& FlatParams::whole() const {
  TESSERA_ASSERT(state_ == ParamState::Ready);
  return sharded_ ? gathered_.bucket() : buffer_.tensor();
}

at::Tensor FlatParams::values(int index) const {
  const shard::Range range = items()[index].range;
  return has_private_copy(index) ? space_.copy_of(index) : whole().narrow(0, range.begin, range.size());
}

at::Tensor FlatParams::view(int index) const {
  return shard::view_as_param(values(index), {0, items()[index].range.size()}, items()[index].form);
}

ParamPartition FlatParams::partition_of(int index) const {
  const shard::Range range = items()[index].range;
  const shard::Range mine = sharded_ ? shard::intersect(range, slice_) : range;
  if (mine.empty()) return {state_, sharded_, {}};
  return {state_, sharded_, {mine.begin - range.begin, mine.end - range.begin}};
}

// Elements `part` of item `index`, in the coordinates of the buffer.
shard::Range FlatParams::there(int index, shard::Range part) const {
  if (part.empty()) return {};
  const int64_t begin = items()[index].range.begin + part.begin - (sharded_ ? slice_.begin : 0);
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
  if (shares()) {
    gathered_.begin(space_, bucket, std::move(staging));
  } else {
    gathered_.begin(group, own(), std::move(bucket), std::move(staging));
  }
  state_ = ParamState::Gathering;
}

int64_t FlatParams::read_ahead(int64_t elements) {
  if (buffer_.residence() != shard::Residence::Nvme || state_ != ParamState::Sharded) return 0;
  return gathered_.away().read_ahead(buffer_, elements);
}

void FlatParams::make_exact(comm::Group& group) {
  TESSERA_ASSERT(sharded_ && state_ == ParamState::Ready);
  gathered_.make_exact(group, own(), space_);
}

void FlatParams::make_private(const at::Tensor& bucket) {
  TESSERA_ASSERT(sharded_ && state_ == ParamState::Ready && is_in_space());
  gathered_.make_private(space_, bucket);
  params_.point(gathered_.bucket());
}

at::Tensor FlatParams::take_bucket() {
  const bool borrowed = is_in_space();
  const at::Tensor bucket = gathered_.take_bucket();
  return borrowed ? at::Tensor() : bucket;
}

void FlatParams::finish_gather() {
  TESSERA_ASSERT(state_ == ParamState::Gathering);
  state_ = ParamState::Sharded;
  gathered_.finish();
  params_.check_none_replaced();
  params_.point(gathered_.bucket());
  state_ = ParamState::Ready;
}

at::Tensor FlatParams::release(std::string* edited) {
  TESSERA_ASSERT(sharded_ && state_ != ParamState::Sharded);
  if (std::exchange(state_, ParamState::Sharded) == ParamState::Gathering) {
    gathered_.drop();
    return take_bucket();
  }
  gathered_.end_use();
  if (edited != nullptr) {
    if (std::string name = params_.written(); !name.empty()) *edited = std::move(name);
  }
  params_.release();
  return take_bucket();
}

void FlatParams::take_replaced(int index) {
  TESSERA_ASSERT(state_ == ParamState::Ready);
  const bool apart = has_private_copy(index);
  const at::Tensor there = apart ? space_.copy_of(index) : whole();
  const shard::Range range = apart ? shard::Range{0, items()[index].range.size()} : items()[index].range;
  if (sharded_ ? is_replaced(index) : !params_.is_bound(index, there, range))
    params_.take_back(index, there, range, /*pointed=*/sharded_);
}

void FlatParams::keep_write(int index) {
  take_replaced(index);
  mark(index);
  if (!sharded_ && !has_private_copy(index)) return;
  const shard::Range range = items()[index].range, mine = shard::intersect(range, slice_);
  if (mine.empty()) return;
  const shard::Range part{mine.begin - range.begin, mine.end - range.begin};
  write(index, part, values(index).narrow(0, part.begin, part.size()));
}

void FlatParams::make_private_copy(int index) {
  TESSERA_ASSERT(shares() && !sharded_ && !has_private_copy(index));
  space_.make_copy(index, items()[index].tensor, items()[index].range);
}

void FlatParams::end_private_copy(int index) {
  if (!has_private_copy(index)) return;
  const Item& item = items()[index];
  if (!space_.end_copy(index, params_.tensor(index), item.range, item.form)) params_.note_storage(index);
}

// A model that goes on without its engine must not change that of the other ranks.
void FlatParams::leave_space() {
  const c10::InferenceMode no_inference(false);
  const at::Tensor own = space_.memory().clone();
  params_.rebind_from(space_.memory(), own);
  buffer_ = shard::Buffer(own);
  space_.reset();
}

void FlatParams::send(const HomeMaker& home) {
  if (residence() != shard::Residence::Device) return;
  if (const auto made = home(shard::Quantity::Weight, local_size(), options())) send_to(made);
}

void FlatParams::send_to(const shard::HomePtr& home) {
  TESSERA_ASSERT(!shares() && (!sharded_ || state_ == ParamState::Sharded));
  if (!buffer_.is_here()) return;
  const at::Tensor here = buffer_.tensor();
  buffer_.send_to(home);
  if (!sharded_)
    params_.release_from(here,
                         "was moved off the device by engine.offload_states(); call engine.reload_states() before it "
                         "is used");
}

void FlatParams::bring_back() {
  const bool whole_and_away = !sharded_ && !buffer_.is_here();
  buffer_.bring_back();
  if (whole_and_away) params_.rebind(buffer_.tensor());
}

void FlatParams::leave(const at::Tensor& all) {
  TESSERA_ASSERT(!sharded_ || state_ == ParamState::Sharded);
  slice_to_write();  // nothing is on its way any more
  params_.leave(all);
  params_.forget();
  sharded_ = false;
  state_ = ParamState::Ready;
  buffer_ = {};
  space_.reset();
}

void FlatParams::make_whole() {
  if (sharded_ && slice_.size() == layout().size()) params_.leave(buffer_.read(slice_));
}

void FlatParams::abandon(const std::string& message) {
  if (!sharded_) {
    if (shares()) leave_space();
    return;
  }
  params_.abandon(message);
  state_ = ParamState::Sharded;
  gathered_.abandon(buffer_);
}

}  // namespace tessera::zero

#include "tessera/zero/away_slice.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

namespace {

constexpr size_t kReads = 3;   // tiles of a slice that are on their way at once
constexpr size_t kCopies = 1;  // tiles of these that are copied to the device

// Starts a read and throws nothing: what goes wrong is for the gather, where all ranks take part.
shard::PendingView fetch(const shard::Buffer& slice, shard::Range tile) {
  try {
    return slice.fetch(tile);
  } catch (const std::exception&) {
    return shard::PendingView({}, [error = std::current_exception()] { std::rethrow_exception(error); });
  }
}

}  // namespace

int64_t AwaySlice::read_ahead(const shard::Buffer& slice, int64_t elements) {
  int64_t reading = 0;
  size_t number = 0;
  for (const shard::Range tile : shard::tiles_of({0, slice.size()})) {
    if (number++ >= ahead_.size()) {
      if (reading + tile.size() > elements) break;
      ahead_.push_back(fetch(slice, tile));
    }
    reading += tile.size();
  }
  return reading;
}

void AwaySlice::end_reads() {
  forget_ahead();
  if (copied_ && !copied_->query()) copied_->synchronize();
  copied_.reset();
}

// A cast is made on the device, by way of words_: torch would cast on the host, into memory that is not
// page-locked.
void AwaySlice::bring(const shard::Buffer& slice, shard::Range range, const at::Tensor& space) {
  const std::vector<shard::Range> tiles = shard::tiles_of({0, slice.size()});
  for (size_t i = 0; i < tiles.size(); ++i) {
    while (ahead_.size() < kReads && i + ahead_.size() < tiles.size())
      ahead_.push_back(slice.fetch(tiles[i + ahead_.size()]));
    const at::Tensor values = space.is_cpu() ? ahead_.front().wait() : ahead_.front().wait_on(space.device());
    const bool pinned = !space.is_cpu() && values.is_pinned();
    const at::Tensor place = space.narrow(0, range.begin + tiles[i].begin, tiles[i].size());
    if (words_.defined()) {
      place.copy_(words_.narrow(0, 0, values.numel()).copy_(values, /*non_blocking=*/pinned));
    } else {
      place.copy_(values, /*non_blocking=*/pinned);
    }
    ahead_.pop_front();
    if (!pinned || slice.residence() != shard::Residence::Nvme) continue;
    copying_.emplace_back(values, shard::mark(space.device()));
    if (copying_.size() <= kCopies) continue;
    copying_.front().second->synchronize();
    copying_.pop_front();
  }
}

// Tiles that passed through memory of a file's may be lent again.
void AwaySlice::end_copies() {
  for (const auto& [values, copied] : std::exchange(copying_, {}))
    copied->synchronize();
}

// Note [Parameters elsewhere]
comm::Pending AwaySlice::gather(comm::Group& group, const shard::Buffer& slice, shard::Range range,
                                const at::Tensor& space, const std::string& label) {
  failure_.clear();
  // This memory is made before anything is on its way, as is all that a gather needs.
  const bool may_fail = slice.residence() == shard::Residence::Nvme && group.size() > 1;
  const at::Tensor failed =
      may_fail ? at::zeros({1}, at::TensorOptions(at::kDouble).device(space.device())) : at::Tensor();
  try {
    bring(slice, range, space);
  } catch (const std::exception& error) {  // also for memory that runs out
    ahead_.clear();
    end_copies();
    if (!may_fail) throw;
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    failure_ = known == nullptr ? error.what() : known->what_without_backtrace();
  }
  if (group.size() == 1) return {};
  comm::Pending pending = group.all_gather(space, space.narrow(0, range.begin, slice.size()), label);
  if (!may_fail) return pending;
  failed_ = failed;
  if (!failure_.empty()) failed_.fill_(group.rank() + 1.0);
  read_check_ = group.all_reduce(failed_, comm::ReduceOp::Max, "reads of " + label);
  return pending;
}

comm::Pending AwaySlice::gather_beside(comm::Group& group, const shard::Buffer& slice, shard::Range range,
                                       const at::Tensor& space, bool casts, const std::string& label) {
  if (space.is_cpu()) return gather(group, slice, range, space, label);
  if (casts) words_ = at::empty({std::min(slice.size(), shard::kTile)}, slice.options());
  comm::Pending pending;
  copied_ = side_.run(space.device(), [&] { pending = gather(group, slice, range, space, label); });
  return pending;
}

void AwaySlice::arrive(at::Device device) {
  if (copied_) shard::come_after(*copied_, device);
  order_.keep(words_);  // the current stream comes after the copies
  words_.reset();
  end_copies();
}

void AwaySlice::check() {
  if (!failed_.defined()) return;
  read_check_.wait();
  const int who = static_cast<int>(std::exchange(failed_, at::Tensor()).item<double>());
  if (who == 0) return;
  TESSERA_CHECK_IO(false, "zero", "the parameters of unit '", unit_, "' could not be gathered: ",
                   !failure_.empty()
                       ? failure_
                       : c10::str("rank ", who - 1, " of its group could not read its slice; see its error"));
}

void AwaySlice::drop(at::Device device) {
  if (copied_) shard::come_after(*copied_, device);
  end_copies();
  read_check_.wait();
}

void AwaySlice::end_gather() {
  for (at::Tensor* memory : {&words_, &failed_}) {  // made on the stream of copies, which does not wait for what ranks
    order_.keep(*memory);                           // exchange there
    memory->reset();
  }
}

void AwaySlice::abandon() {
  read_check_.release();
  ahead_.clear();
  copying_.clear();
  for (at::Tensor* memory : {&words_, &failed_}) {
    order_.keep(*memory, copied_.get());
    memory->reset();
  }
}

}  // namespace tessera::zero

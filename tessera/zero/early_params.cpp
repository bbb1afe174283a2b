#include "tessera/zero/early_params.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/heap.h"
#include "tessera/base/transforms.h"
#include "tessera/shard/device.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

namespace {
constexpr int64_t kTrimAfter = 32 << 20;  // bytes freed between two calls of heap::return_free_pages()
}

EarlyParams::EarlyParams(Ranks ranks, HomeMaker home) : ranks_(std::move(ranks)), home_(std::move(home)) {}

EarlyParams::~EarlyParams() {
  const transforms::Unobserved apart;
  entries_.clear();
}

// Null where this rank's slice could not be written; all ranks throw then.
std::unique_ptr<FlatParams> EarlyParams::partition(std::vector<FlatParams::Item> items, at::ScalarType dtype) const {
  std::unique_ptr<FlatParams> flat;
  RankGuard disks(home_ != nullptr);
  disks.run([&] {
    const std::string title = items.front().name;
    flat = std::make_unique<FlatParams>(title, std::move(items), dtype, ranks_.shard->rank(), ranks_.shard->size(),
                                        true, at::Tensor(), home_);
    flat->flush();
  });
  agree(disks);
  return flat;
}

void EarlyParams::agree(const RankGuard& disks) const {
  if (home_) disks.agree(ranks_).check("[zero] parameters could not be brought to where they shall live: ");
}

// The parameters that still are partitioned, or would be with more ranks.
std::vector<EarlyParams::Entry*> EarlyParams::held(const std::vector<int>& numbers) {
  std::vector<Entry*> found;
  for (const int number : numbers) {
    if (entries_.at(number).flat != nullptr) found.push_back(&entries_[number]);
  }
  return found;
}

// Takes a parent's `child.weight.data = values` while the model is built as the values from now on. All ranks do the same.
void EarlyParams::take_replaced(Entry& entry) {
  if (!entry.flat->sharded() || !entry.flat->is_replaced(0)) return;
  const c10::AutoGradMode no_grad(false);
  const FlatParams& old = *entry.flat;
  std::vector<FlatParams::Item> items{{old.name(), old.items().front().tensor, {}}};
  broadcast_words(ranks_, {items.front().tensor}, 0, "initial values of parameter '" + old.name() + "'");
  entry.flat = partition(std::move(items), old.dtype());
}

int EarlyParams::add(std::string name, at::Tensor tensor, at::ScalarType dtype) try {
  const c10::AutoGradMode no_grad(false);
  TESSERA_CHECK_VALUE(!tensor.is_meta(), "zero", "parameter '", name, "' is on the meta device and has no values");
  TESSERA_CHECK_VALUE(tensor.is_leaf() && at::isFloatingType(tensor.scalar_type()), "zero", "parameter '", name,
                      "' cannot be partitioned: it is not a leaf of floating-point values");
  shard::check_device(tensor.device());
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  std::vector<FlatParams::Item> items{{std::move(name), std::move(tensor), {}}};
  broadcast_words(ranks_, {items.front().tensor}, 0, "initial values of parameter '" + items.front().name + "'");
  entries_.push_back({partition(std::move(items), dtype)});
  freed_ += bytes;
  if (freed_ >= kTrimAfter) {
    heap::return_free_pages();
    freed_ = 0;
  }
  return static_cast<int>(entries_.size()) - 1;
} catch (const c10::OutOfMemoryError& error) {
  end_groups(error, ranks_);
  throw;
}

void EarlyParams::check_writer(Writes writes, int writer) const {
  TESSERA_CHECK_VALUE(writes != Writes::FromRank || (writer >= 0 && writer < ranks_.size()), "zero.GatheredParameters",
                      "modifier_rank ", writer, " is no rank of a group of ", ranks_.size());
}

void EarlyParams::gather(const std::vector<int>& numbers, Writes writes, int writer) try {
  check_writer(writes, writer);
  const std::vector<Entry*> entries = held(numbers);
  for (const Entry* e : entries) {
    TESSERA_CHECK(!e->open, "zero.GatheredParameters", "parameter '", e->flat->name(),
                  "' is in an open GatheredParameters region already; regions must not overlap");
  }
  std::vector<FlatParams*> begun;
  for (Entry* e : entries) {
    take_replaced(*e);
    FlatParams& flat = *e->flat;
    e->open = true;
    if (!flat.sharded()) {
      flat.mark(0);
      continue;
    }
    const auto options = flat.items().front().tensor.options().requires_grad(false).dtype(flat.dtype());
    flat.begin_gather(*ranks_.shard, at::empty({flat.layout().size()}, options));
    begun.push_back(&flat);
  }
  for (FlatParams* flat : begun)
    flat->finish_gather();
} catch (const c10::OutOfMemoryError& error) {
  end_groups(error, ranks_);
  throw;
}

void EarlyParams::release(const std::vector<int>& numbers, Writes writes, int writer) try {
  const c10::AutoGradMode no_grad(false);
  check_writer(writes, writer);
  std::string edited;
  RankGuard disks(home_ != nullptr);
  for (Entry* e : held(numbers)) {
    if (!std::exchange(e->open, false)) continue;
    FlatParams& flat = *e->flat;
    if (writes == Writes::None) {
      if (flat.was_written(0)) edited = flat.name();
    } else {
      flat.take_replaced(0);
      if (writes == Writes::FromRank) {
        ranks_.broadcast(flat.whole(), writer, "new values of '" + flat.name() + "'");
      }
      disks.run([&] {
        flat.keep_write(0);
        flat.flush();
      });
    }
    if (flat.sharded()) flat.release();
  }
  agree(disks);
  TESSERA_CHECK(edited.empty(), "zero", "in-place modification of parameter '", edited,
                "' while it was gathered for reading is lost; edit it inside GatheredParameters with modifier_rank 0");
} catch (const c10::OutOfMemoryError& error) {
  end_groups(error, ranks_);
  throw;
}

bool EarlyParams::is_gathered(int number) const {
  return entries_.at(number).flat == nullptr || entries_[number].flat->state() == ParamState::Ready;
}

ParamPartition EarlyParams::partition_of(int number) const {
  TESSERA_CHECK(entries_.at(number).flat != nullptr, "zero", "early parameter ", number, " is held no more");
  return entries_[number].flat->partition_of(0);
}

void EarlyParams::restore(int number) {
  if (entries_.at(number).flat == nullptr) return;
  Entry& e = entries_[number];
  if (!e.open) take_replaced(e);
  FlatParams& flat = *e.flat;
  if (flat.sharded()) {
    if (!e.open) gather({number}, Writes::None, 0);
    at::Tensor tensor = flat.items().front().tensor;
    shard::bind(tensor, flat.whole(), flat.items().front().range, flat.items().front().form);
  }
  e = {};
}

void EarlyParams::prune() {
  for (Entry& e : entries_) {
    if (e.flat != nullptr && e.flat->is_alone(0)) e = {};
  }
}

at::Tensor EarlyParams::held_values(int number) const {
  const ParamPartition partition = partition_of(number);
  return entries_[number].flat->read(0, partition.held);
}

int64_t EarlyParams::bytes() const {
  int64_t sum = 0;
  for (const Entry& e : entries_)
    sum += e.flat == nullptr || e.flat->residence() != shard::Residence::Device ? 0 : e.flat->bytes();
  return sum;
}

}  // namespace tessera::zero

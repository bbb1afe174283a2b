#include "tessera/zero/tile.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/part.h"
#include "tessera/zero/memory_for.h"
#include "tessera/zero/rank_guard.h"

namespace tessera::zero {

namespace {

constexpr size_t kNarrow = 2;                 // bytes of an element
enum : size_t { kWeights, kGrads, kStates };  // what a tile is of; the last ones are Unit::state_buffers()

// Copies beside other work, where the host's memory is page-locked or takes what comes in its own time.
void copy_beside(const at::Tensor& to, const at::Tensor& from) {
  to.copy_(from, /*non_blocking=*/to.is_cpu() || from.is_pinned());
}

c10::Device lives_at(bool is_here, const Unit& unit) {
  return is_here ? unit.flat().options().device() : c10::Device(c10::kCPU);
}

}  // namespace

c10::Device device_of_update(const Unit& unit) {
  const c10::Device device = unit.flat().options().device();
  if (device.is_cpu() || states_on_device(unit) || unit.state_residence().by_device) return device;
  const auto narrow = [](const shard::Buffer* b) {
    return !b->defined() || b->options().dtype().itemsize() <= kNarrow;
  };
  return std::ranges::all_of(unit.state_buffers(), narrow) ? device : c10::Device(c10::kCPU);
}

void TileRing::reserve(size_t quantity, int64_t size, at::ScalarType dtype, c10::Device on, bool pin) {
  const int64_t bytes = size * static_cast<int64_t>(c10::elementSize(dtype));
  const auto options = at::TensorOptions(at::kByte).device(on).pinned_memory(pin && on.is_cpu());
  for (Slot& slot : slots_) {
    at::Tensor& memory = slot.bytes[quantity];
    if (memory.defined() && memory.numel() >= bytes) continue;
    shard::StreamOrder().keep(memory, slot.free.get());
    memory = memory_for([&] { return at::empty({bytes}, options); }, "tiles of an update");
    if (on.is_cpu()) continue;
    if (slot.free) shard::come_after(*slot.free, on);
    slot.free = shard::mark(on);  // whoever had the memory before, too
  }
}

at::Tensor TileRing::view(const Slot& slot, size_t quantity, int64_t size, at::ScalarType dtype) {
  return shard::elements_in(slot.bytes[quantity], size, dtype);
}

void TileRing::clear() noexcept {
  for (Slot& slot : slots_) {
    for (at::Tensor& memory : slot.bytes) {
      shard::StreamOrder().keep(memory, slot.free.get());
      memory.reset();
    }
  }
}

bool Lanes::has_room(const Units& all) const {
  const auto passes = [](const auto& unit) {
    return !unit->flat().options().device().is_cpu() && !lives_on_device(*unit);
  };
  return units == all.all().size() || std::ranges::none_of(all.all(), passes);
}

void Lanes::make_room(const Units& all) {
  for (const auto& unit : all.all()) {
    const c10::Device on = device_of_update(*unit);
    TileRing& ring = on.is_cpu() ? on_host : on_device;
    const auto reserve = [&](size_t quantity, bool is_here, at::ScalarType dtype) {
      if (lives_at(is_here, *unit) == on) return;
      ring.reserve(quantity, std::min(unit->owned().size(), kTile), dtype, on, all.options().pin_memory);
    };
    reserve(kWeights, unit->weights().is_here(), unit->weights().dtype());
    reserve(kGrads, unit->host_grads() == nullptr, unit->grad_options().dtype().toScalarType());
    for (size_t i = 0; const shard::Buffer* buffer : unit->state_buffers()) {
      if (buffer->defined()) reserve(kStates + i, buffer->is_here(), buffer->dtype());
      ++i;
    }
  }
  units = all.all().size();
}

Tile::Tile(Unit& unit, const shard::Buffer& grads, shard::Range range, std::vector<Segment> segments, bool last,
           double scale, const Options& options)
    : unit_(&unit),
      range_(range),
      segments_(std::move(segments)),
      last_(last),
      scale_(scale),
      options_(&options),
      device_(unit.flat().options().device()),
      updates_on_(device_of_update(unit)) {
  carry(kWeights, unit.weights(), reads_weights(), true);
  if (grads.defined()) carry(kGrads, grads, true, false);
  for (size_t i = 0; const shard::Buffer* buffer : unit.state_buffers())
    carry(kStates + i++, *buffer, true, true);
}

// Values that were not updated may be on their way still.
Tile::~Tile() {
  if (!came_ || updated_) return;
  try {
    came_->synchronize();
  } catch (const std::exception&) {
    // A device that fails: its next use throws.
  }
}

void Tile::carry(size_t quantity, const shard::Buffer& buffer, bool reads, bool changes) {
  if (!buffer.defined()) return;
  Carried& c = carried_[quantity];
  c.buffer = buffer;
  c.reads = reads;
  c.changes = changes;
  c.travels = lives_at(buffer.is_here(), *unit_) != updates_on_;
  travels_ = travels_ || c.travels;
  c.pending = reads ? buffer.fetch(range_) : buffer.to_fill(range_);
}

// False where the master is apart, all elements are written, and nothing of the weights is taken over or stays as before.
bool Tile::reads_weights() const {
  int64_t written = 0;
  for (const Segment& segment : segments_)
    written += segment.adopts ? 0 : segment.range.size();
  return !unit_->master().defined() || written != range_.size();
}

void Tile::set_out(Lanes& lanes, const std::shared_ptr<c10::Event>& since, bool apart) {
  if (!travels_) return;
  const bool of_host = updates_on_.is_cpu();
  since_ = since;
  apart_ = apart;
  TileRing& ring = of_host ? lanes.on_host : lanes.on_device;
  slot_ = &ring.next();
  for (size_t i = 0; i < carried_.size(); ++i)
    if (carried_[i].travels) carried_[i].here = TileRing::view(*slot_, i, range_.size(), carried_[i].buffer.dtype());
  shard::SideStream& there = of_host ? lanes.host_there : lanes.there;
  came_ = there.run(
      device_,
      [&] {
        if (of_host) shard::come_after(*since_, device_);
        if (slot_->free) shard::come_after(*slot_->free, device_);
        for (Carried& c : carried_) {
          if (!c.travels) continue;
          c.home = c.pending->wait_on(device_);
          if (c.reads) copy_beside(c.here, c.home);
        }
      },
      shard::SideStream::After::Nothing);
  slot_->free = came_;
}

at::Tensor Tile::part(size_t quantity, shard::Range range) const {
  if (!carried_[quantity].pending) return {};
  return shard::part_of(carried_[quantity].here, {range.begin - range_.begin, range.end - range_.begin});
}

at::Tensor Tile::gradient(const Segment& segment) const {
  if (carried_[kGrads].pending) return part(kGrads, segment.range);
  const auto [buffer, there] = unit_->gradient(*segment.param, segment.range);
  return shard::part_of(buffer.tensor(), there);
}

optim::UpdateSlice Tile::slice(const Segment& segment) const {
  const at::Tensor weights = part(kWeights, segment.range);
  const bool fp32_weights = weights.scalar_type() == at::kFloat;  // then they are the master
  optim::UpdateSlice slice;
  slice.master = fp32_weights ? weights : part(kStates, segment.range);
  if (!fp32_weights) slice.weight = weights;
  slice.adopts = segment.adopts;
  slice.residual = part(kStates + 1, segment.range);
  slice.grad = gradient(segment);
  slice.state = {part(kStates + 2, segment.range), part(kStates + 3, segment.range)};
  slice.rounding = options_->precision.rounding;
  slice.random = {options_->seed, static_cast<uint64_t>(segment.step), segment.first};
  slice.run = segment.run;
  slice.stride = segment.stride;
  return slice;
}

void Tile::run(optim::Rule rule, const std::vector<optim::GroupOptions>& groups) {
  std::vector<optim::Update> updates;
  for (const Segment& segment : segments_)
    updates.push_back({&groups[segment.group], segment.step, slice(segment)});
  optim::update(rule, updates, scale_);
}

const std::shared_ptr<c10::Event>& Tile::update(optim::Rule rule, const std::vector<optim::GroupOptions>& groups,
                                                Lanes& lanes) {
  for (Carried& c : carried_)
    if (c.pending && !c.travels) c.here = c.pending->wait();
  if (travels_ && !updates_on_.is_cpu()) {
    using After = shard::SideStream::After;
    updated_ = lanes.work.run(
        device_,
        [&] {
          shard::come_after(*came_, device_);
          apart_ ? shard::come_after(*since_, device_) : unit_->on_this_stream();
          run(rule, groups);
        },
        apart_ ? After::Nothing : After::Current);
  } else {
    if (came_) came_->synchronize();
    run(rule, groups);
  }
  for (size_t i = 0; i < carried_.size(); ++i) {
    const Carried& c = carried_[i];
    if (!c.pending || c.travels || !c.changes || c.buffer.is_here()) continue;
    (i == kWeights ? unit_->weights_to_write() : c.buffer).store(range_, c.here);
  }
  return updated_;
}

std::optional<Returning> Tile::set_back(Lanes& lanes) {
  if (!travels_) return {};
  const auto copy = [&] {
    for (const Carried& c : carried_)
      if (c.travels && c.changes) copy_beside(c.home, c.here);
  };
  if (updates_on_.is_cpu()) {
    slot_->free = updated_ = lanes.host_back.run(
        device_,
        [&] {
          shard::come_after(*since_, device_);
          if (!apart_) unit_->order().take_over(device_);
          copy();
        },
        shard::SideStream::After::Nothing);
    return {};
  }
  if (carried_[kWeights].travels) carried_[kWeights].buffer = unit_->weights_to_write();
  slot_->free = lanes.back.run(
      device_,
      [&] {
        shard::come_after(*updated_, device_);
        copy();
      },
      shard::SideStream::After::Nothing);
  Returning left{{}, range_, slot_->free};
  for (const Carried& c : carried_)
    if (c.travels && c.changes && !c.buffer.arrives(range_, slot_->free)) left.values.emplace_back(c.buffer, c.home);
  if (left.values.empty()) return {};
  return left;
}

}  // namespace tessera::zero

#include "tessera/zero/tile_pipeline.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <array>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/shard/side_stream.h"

namespace tessera::zero {

namespace {

// `from`, on a device, on its way to host memory. (torch keeps pinned memory while a copy of it is on its way.)
shard::PendingView bring_to_host(const at::Tensor& from, bool pin) {
  const at::Tensor there = at::empty(from.sizes(), from.options().device(at::kCPU).pinned_memory(pin));
  there.copy_(from, /*non_blocking=*/true);
  return shard::PendingView(there, [copied = shard::mark(from.device())] { copied->synchronize(); });
}

}  // namespace

// Consecutive parameters of an owned range that share group and step count; gaps between them hold zeros.
struct TilePipeline::Segment {
  shard::Range range;  // in the coordinates of the owned range
  int group = 0;
  int64_t step = 0;
  uint64_t first = 0;  // number of the first element in the model, where it matters
};

// `numbered`: the elements of a segment are those of the whole model from `first` on, one after the other.
std::vector<TilePipeline::Segment> TilePipeline::segments_of(const Unit& unit, const std::vector<bool>& present,
                                                             bool numbered) {
  std::vector<Segment> segments;
  bool open = false;
  for (const Param& p : unit.params) {
    const shard::Range mine = unit.owned_slice(p);
    if (mine.empty()) continue;
    if (!present[p.id]) {
      open = false;
    } else if (numbered) {
      const int64_t skipped = unit.owned.begin + mine.begin - p.range.begin;
      shard::for_stretches(p.cut, {skipped, skipped + mine.size()}, [&](shard::Range r, int64_t number) {
        const int64_t begin = mine.begin + r.begin - skipped;
        segments.push_back({{begin, begin + r.size()}, p.group, p.step + 1, p.first + static_cast<uint64_t>(number)});
      });
    } else if (open && segments.back().group == p.group && segments.back().step == p.step + 1) {
      segments.back().range.end = mine.end;
    } else {
      segments.push_back({mine, p.group, p.step + 1});
      open = true;
    }
  }
  return segments;
}

// `segments` cut at multiples of kTile.
std::vector<TilePipeline::Segment> TilePipeline::in_tiles(const std::vector<Segment>& segments) {
  std::vector<Segment> pieces;
  for (const Segment& s : segments) {
    for (int64_t begin = s.range.begin; begin < s.range.end;) {
      Segment piece = s;
      piece.range = {begin, std::min((begin / kTile + 1) * kTile, s.range.end)};
      piece.first += static_cast<uint64_t>(begin - s.range.begin);
      pieces.push_back(piece);
      begin = piece.range.end;
    }
  }
  return pieces;
}

// A piece of a unit's update: its buffers' values on their way to who updates, and back. States that do not live on the
// device are updated by the host, which then takes gradients and weights from the device and sends weights back. Weights
// that do not live there are one buffer more, and go where the update is.
class TilePipeline::Tile {
 public:
  // `range`: of the owned range, whose gradients are `grads`. `last`: of its unit. `away`: its states do not live on the
  // device.
  Tile(Unit& unit, const shard::Buffer& grads, shard::Range range, std::vector<Segment> segments, bool last, bool away,
       bool pin)
      : unit_(&unit),
        range_(range),
        segments_(std::move(segments)),
        last_(last),
        weights_here_(unit.weights().is_here()),
        weights_(fetch_weights()),
        grads_(grads.fetch(range)) {
    for (const shard::Buffer* buffer : buffers())
      views_.push_back(buffer->defined() ? std::optional(buffer->fetch(range)) : std::nullopt);
    if (!away || grads.options().device().is_cpu()) return;
    if (grads.is_here()) grads_ = bring_to_host(grads_.wait(), pin);
    if (!weights_here_) return;
    device_weights_ = weights_.wait();
    weights_ = bring_to_host(device_weights_, pin);
  }

  void update(optim::Rule rule, const std::vector<optim::GroupOptions>& groups, const Options& options, double scale) {
    if (!weights_here_) weights_ = shard::PendingView(weights_.wait().to(grads_.wait().device()));
    for (const Segment& segment : segments_)
      update(segment, rule, groups[segment.group], options, scale);
    if (!weights_here_) unit_->weights_to_write().store(range_, weights_.wait());
    if (device_weights_.defined()) device_weights_.copy_(weights_.wait(), /*non_blocking=*/true);
    for (size_t i = 0; i < views_.size(); ++i)
      if (views_[i]) buffers()[i]->store(range_, views_[i]->wait());
  }

  Unit& unit() const { return *unit_; }
  bool is_last() const { return last_; }

 private:
  std::array<const shard::Buffer*, 4> buffers() const { return unit_->state_buffers(); }
  // Where the master is apart, and all of them are written, nothing has to come.
  shard::PendingView fetch_weights() const {
    int64_t written = 0;
    for (const Segment& segment : segments_)
      written += segment.range.size();
    const shard::Buffer weights = unit_->weights();
    if (weights_here_ || !unit_->master.defined() || written < range_.size()) return weights.fetch(range_);
    return shard::PendingView(at::empty({range_.size()}, weights.options().device(at::kCPU)));
  }
  at::Tensor arrived(shard::PendingView& values, shard::Range range) const {
    return values.wait().narrow(0, range.begin - range_.begin, range.size());
  }
  at::Tensor arrived(size_t buffer, shard::Range range) {
    return views_[buffer] ? arrived(*views_[buffer], range) : at::Tensor();
  }
  void update(const Segment& segment, optim::Rule rule, const optim::GroupOptions& group, const Options& options,
              double scale) {
    const at::Tensor weights = arrived(weights_, segment.range);
    const bool fp32_weights = weights.scalar_type() == at::kFloat;  // then they are the master
    optim::UpdateSlice slice;
    slice.master = fp32_weights ? weights : arrived(0, segment.range);
    if (!fp32_weights) slice.weight = weights;
    slice.residual = arrived(1, segment.range);
    slice.grad = arrived(grads_, segment.range);
    slice.state = {arrived(2, segment.range), arrived(3, segment.range)};
    slice.rounding = options.precision.rounding;
    slice.random = {options.seed, static_cast<uint64_t>(segment.step), segment.first};
    optim::update(rule, group, segment.step, slice, scale);
  }

  Unit* unit_;
  shard::Range range_;
  std::vector<Segment> segments_;
  bool last_;
  bool weights_here_;
  std::vector<std::optional<shard::PendingView>> views_;
  shard::PendingView weights_, grads_;
  at::Tensor device_weights_;  // where the host updates a copy
};

TilePipeline::TilePipeline(Units& units, double scale, DiskGuard& disks, std::function<void(Unit&)> done)
    : units_(units), scale_(scale), disks_(disks), done_(std::move(done)) {}

TilePipeline::~TilePipeline() = default;

void TilePipeline::add(Unit& unit, const shard::Buffer& grads, const std::vector<bool>& present) {
  std::vector<Segment> segments = segments_of(unit, present, units_.options().precision.update_is_random());
  if (lives_on_device(unit)) return add(unit, grads, {0, unit.owned.size()}, std::move(segments), true, false);
  const bool away = !states_on_device(unit);
  segments = in_tiles(segments);
  if (segments.empty()) {
    finish();
    done_(unit);
  }
  for (auto begin = segments.begin(); begin != segments.end();) {
    const int64_t number = begin->range.begin / kTile;
    const auto end =
        std::find_if(begin, segments.end(), [&](const Segment& s) { return s.range.begin / kTile > number; });
    const shard::Range range{number * kTile, std::min((number + 1) * kTile, unit.owned.size())};
    add(unit, grads, range, {begin, end}, end == segments.end(), away);
    begin = end;
  }
}

void TilePipeline::finish() {
  if (!next_) return;
  const NamedRange range("update", next_->unit().name);
  disks_.run([&] { next_->update(units_.rule(), units_.groups(), units_.options(), scale_); });
  if (next_->is_last()) done_(next_->unit());
  next_.reset();
}

void TilePipeline::add(Unit& unit, const shard::Buffer& grads, shard::Range range, std::vector<Segment> segments,
                       bool last, bool away) {
  std::unique_ptr<Tile> tile;
  disks_.run([&] {
    tile = std::make_unique<Tile>(unit, grads, range, std::move(segments), last, away, units_.options().pin_memory);
  });
  finish();
  if (tile) {
    next_ = std::move(tile);
  } else if (last) {
    done_(unit);
  }
}

}  // namespace tessera::zero
